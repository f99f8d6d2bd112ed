"""Cases A to F: the requests of each case, and the figures that are computed from the answers.

The two numbers of a case are input tokens and output tokens per request. A: one stream, 512 in and
256 out. B: 256 requests at once, 512 in and 256 out. C: 64 requests, 32 in and 512 out. D: 64
requests, 4096 in and 1 out. E: 64 requests that share a prefix of 4096 tokens, each with 64 further
tokens in and 32 out; E runs first without the prefix in the cache, then with it. F: 256 streamed
requests, at most 64 in flight, 512 in and 256 out. A to E run against any target; F needs HTTP.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.datasets import TokenSource, random_requests, shared_prefix_requests
from headrace.bench.load import Target, drive, run_at_once
from headrace.bench.record import BenchRequest, RequestRecord, summarize


@dataclass(frozen=True)
class Sizes:
    """The sizes of all cases; smaller ones let the cases run on a CPU."""

    a_input: int = 512
    a_output: int = 256
    b_requests: int = 256
    c_requests: int = 64
    c_input: int = 32
    c_output: int = 512
    d_requests: int = 64
    d_input: int = 4096
    e_requests: int = 64
    e_prefix: int = 4096
    e_own: int = 64
    e_output: int = 32
    f_requests: int = 256
    f_concurrency: int = 64
    repeat: int = 3


# Figures that B to D report. Cached tokens are among them, because any cached token would make the
# input rate wrong.
_THROUGHPUT = ("input_tok_per_s", "output_tok_per_s", "duration_s", "cached_tokens")

FULL = Sizes()
# Sizes for a machine with two CPU cores, large enough to see that every case works.
SMOKE = Sizes(32, 8, 4, 3, 8, 8, 3, 64, 3, 64, 8, 4, 6, 3, 1)


class Cases:
    """Runs cases against one target; every repetition uses new prompts."""

    def __init__(self, target: Target, vocab_size: int, sizes: Sizes = FULL, seed: int = 0) -> None:
        self.target = target
        self.sizes = sizes
        self.source = TokenSource(random.Random(seed), vocab_size)

    async def run(self, name: str) -> dict[str, Any]:
        """Run case `name` and return its figures."""
        by_name: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "A": self.one_stream,
            "B": self.many_at_once,
            "C": self.long_outputs,
            "D": self.long_prompts,
            "E": self.shared_prefix,
            "F": self.concurrent_streams,
        }
        return await by_name[name]()

    def _random(self, count: int, input_len: int, output_len: int) -> list[BenchRequest]:
        return random_requests(self.source, count, input_len, output_len)

    async def one_stream(self) -> dict[str, Any]:
        """Case A: time one request at a time."""
        sizes = self.sizes
        await run_at_once(self._random(1, sizes.a_input, sizes.a_output), self.target)
        runs = []
        for _ in range(sizes.repeat + 2):
            (record,) = await run_at_once(
                self._random(1, sizes.a_input, sizes.a_output), self.target
            )
            tpot = record.tpot_s
            runs.append(
                {
                    "ttft_ms": record.ttft_s * 1e3,
                    "tpot_ms": (tpot or 0.0) * 1e3,
                    "cached_tokens": record.cached_tokens,
                }
            )
        return {name: _median(runs, name) for name in ("ttft_ms", "tpot_ms")} | {"runs": runs}

    async def many_at_once(self) -> dict[str, Any]:
        """Case B: time many requests that are sent at once."""
        sizes = self.sizes
        return await self._throughput(sizes.b_requests, sizes.a_input, sizes.a_output)

    async def long_outputs(self) -> dict[str, Any]:
        """Case C: time short prompts with long outputs."""
        sizes = self.sizes
        return await self._throughput(sizes.c_requests, sizes.c_input, sizes.c_output)

    async def long_prompts(self) -> dict[str, Any]:
        """Case D: time long prompts with one output token each."""
        return await self._throughput(self.sizes.d_requests, self.sizes.d_input, 1)

    async def _throughput(self, count: int, input_len: int, output_len: int) -> dict[str, Any]:
        # Kernels compile and graphs are captured for this batch before the clock runs.
        await run_at_once(self._random(count, input_len, min(4, output_len)), self.target)
        runs = []
        for _ in range(self.sizes.repeat):
            records = await run_at_once(self._random(count, input_len, output_len), self.target)
            runs.append(_figures(records, _THROUGHPUT))
        return {name: _median(runs, name) for name in runs[0]} | {"runs": runs}

    async def shared_prefix(self) -> dict[str, Any]:
        """Case E: time requests with a common prefix, first uncached and then cached."""
        sizes = self.sizes
        runs = []
        # The first round warms up and is not counted.
        for _ in range(sizes.repeat + 1):
            await self.target.flush_cache()
            prefix = self.source.ids(sizes.e_prefix)
            run = {}
            for name in ("cold_s", "hot_s"):
                requests = shared_prefix_requests(
                    self.source, sizes.e_requests, prefix, sizes.e_own, sizes.e_output
                )
                records = await run_at_once(requests, self.target)
                run[name] = summarize(records)["duration_s"]
                run[f"{name[:-2]}_cached_tokens"] = sum(record.cached_tokens for record in records)
            runs.append(run)
        counted = runs[1:]
        return {name: _median(counted, name) for name in ("cold_s", "hot_s")} | {"runs": counted}

    async def concurrent_streams(self) -> dict[str, Any]:
        """Case F: time streamed requests with a limited number in flight."""
        sizes = self.sizes
        warm = self._random(sizes.f_concurrency, sizes.a_input, min(8, sizes.a_output))
        await run_at_once(warm, self.target)
        runs = []
        for _ in range(sizes.repeat):
            requests = self._random(sizes.f_requests, sizes.a_input, sizes.a_output)
            numbered = [(index, 0.0, request) for index, request in enumerate(requests)]
            records = await drive(numbered, self.target, max_concurrency=sizes.f_concurrency)
            runs.append(summarize(records))
        runs.sort(key=lambda run: run["output_tok_per_s"])
        middle = runs[len(runs) // 2]
        return {
            "output_tok_per_s": middle["output_tok_per_s"],
            "num_failed": sum(run["num_failed"] for run in runs),
            # If each token arrives by itself, there are as many events as tokens, and a gap between
            # two events is the time of one token.
            "num_events": middle["num_events"],
            "output_tokens": middle["output_tokens"],
            **{
                f"{name}_{which}": middle[f"{name}_ms"].get(which, 0.0)
                for name in ("ttft", "tpot", "itl")
                for which in ("p50", "p99")
            },
            "runs": runs,
        }


def line(name: str, result: dict[str, Any]) -> str:
    """Return the result of one case as one line of text."""
    figures = (
        f"{key} {value:.5g}" for key, value in result.items() if isinstance(value, int | float)
    )
    return f"{name}: " + "  ".join(figures)


def scaled(sizes: Sizes, **changes: int | None) -> Sizes:
    """Return `sizes` with the given numbers replaced; None keeps a number."""
    given = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(sizes, **given)


def _figures(records: Sequence[RequestRecord], names: Sequence[str]) -> dict[str, float]:
    summary = summarize(records)
    return {name: summary[name] for name in names}


def _median(runs: Sequence[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)
