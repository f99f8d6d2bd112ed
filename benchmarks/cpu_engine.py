"""Compares our engine (real processes, streamed tokens) with `generate` of `transformers` on a CPU.

    python -m benchmarks.cpu_engine [--shape small 0.5b] [--batch 1 8 32] [--json out.json]
    python -m benchmarks.cpu_engine --beside-adapter --shape 135m 0.6b

The second command compares with the same engine under `--model-impl transformers`, instead of
`generate`. It shows what it costs to serve a model without a family of its own.

Both sides get random weights of the same shape and prompts of 128 random ids; decoding is greedy
and ignores the end-of-sequence token. Output tokens per second are all tokens of the batch, divided
by the time from the last request's first token to the end. So they do not include prefill, which is
timed separately. A figure is the best of `--repeat` runs. The sides alternate. Other load on the
machine only makes a run slower, so the best run is the least disturbed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from headrace.bench.datasets import TokenSource, random_requests
from headrace.bench.engine_target import EngineTarget, engine_config, running_engine
from headrace.bench.environment import describe_environment, write_json
from headrace.bench.load import run_at_once
from headrace.bench.shapes import write_shape

SHAPE_NAMES = ("small", "0.5b", "135m", "0.6b")
DEFAULT_SHAPES = ("small", "0.5b")
PROMPT_LEN = 128
PREFILL_LEN = 1024


SERVER_OPTIONS = (
    *("--device", "cpu", "--dtype", "bfloat16", "--context-length", "2048"),
    *("--max-total-tokens", "65536", "--max-running-requests", "64"),
    *("--chunked-prefill-size", "1024", "--disable-radix-cache", "--random-seed", "0"),
)


class Ours:
    """Our engine's own processes, measured as in `bench offline`."""

    def __init__(self, engine: EngineTarget) -> None:
        self.engine = engine
        self.source = TokenSource(random.Random(0), engine.vocab_size)

    async def decode(self, batch: int, num_tokens: int) -> float:
        requests = random_requests(self.source, batch, PROMPT_LEN, num_tokens)
        records = await run_at_once(requests, self.engine)
        start = max(record.event_times[0] for record in records)
        end = max(record.event_times[-1] for record in records)
        num_later = sum(
            count
            for record in records
            for when, count in zip(record.event_times, record.event_tokens, strict=True)
            if when > start
        )
        return num_later / (end - start)

    async def prefill(self, length: int) -> float:
        (record,) = await run_at_once(random_requests(self.source, 1, length, 1), self.engine)
        return length / record.e2e_s


class Transformers:
    """`generate` of `transformers` on the same shape in this process."""

    def __init__(self, folder: Path, threads: int, dtype: str = "bfloat16") -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(threads)
        config = AutoConfig.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
        self.torch = torch

    async def decode(self, batch: int, num_tokens: int) -> float:
        torch = self.torch
        ids = torch.randint(1, self.model.config.vocab_size, (batch, PROMPT_LEN))
        times = []
        for length in (1, num_tokens):
            started = time.perf_counter()
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
            )
            times.append(time.perf_counter() - started)
        return batch * (num_tokens - 1) / (times[1] - times[0])

    async def prefill(self, length: int) -> float:
        torch = self.torch
        ids = torch.randint(1, self.model.config.vocab_size, (1, length))
        with torch.inference_mode():
            started = time.perf_counter()
            self.model(ids, logits_to_keep=1)
            return length / (time.perf_counter() - started)


async def measure(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures of one shape; the sides alternate."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = write_shape(shape, Path(name) / shape)
        model = ["--model-path", str(folder), "--load-format", "dummy"]
        threads = ["--num-threads", str(options.threads)]
        line = [*model, *SERVER_OPTIONS, *threads]
        async with contextlib.AsyncExitStack() as stack:
            ours = await stack.enter_async_context(started(line))
            theirs: Transformers | Ours | None = None
            if options.beside_adapter:
                adapted = await stack.enter_async_context(
                    started([*line, "--model-impl", "transformers"])
                )
                theirs = Ours(adapted)
            elif not options.ours_only:
                theirs = Transformers(folder, options.threads)
            return await compare(shape, ours, theirs, options)


@contextlib.asynccontextmanager
async def started(line: list[str]) -> AsyncIterator[EngineTarget]:
    """Run an engine with these options."""
    with engine_config(None, line) as config:
        async with running_engine(config) as engine:
            yield engine


async def compare(
    shape: str,
    engine: EngineTarget,
    theirs: Transformers | Ours | None,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Measure both sides alternately, our side on `engine`."""
    ours = Ours(engine)
    result: dict[str, Any] = {"shape": shape, "ready_s": round(engine.start_s, 2)}
    other_name = "adapter" if options.beside_adapter else "transformers"
    num_tokens = options.tokens
    for batch in options.batch:
        mine, other = [], []
        for _ in range(options.repeat):
            mine.append(await ours.decode(batch, num_tokens))
            if theirs is not None:
                other.append(await theirs.decode(batch, num_tokens))
        result[f"decode_b{batch}"] = pair(mine, other, other_name)
    mine, other = [], []
    for _ in range(options.repeat + 1):
        mine.append(await ours.prefill(PREFILL_LEN))
        if theirs is not None:
            other.append(await theirs.prefill(PREFILL_LEN))
    result["prefill_1024"] = pair(mine, other, other_name)
    result["worker_rss_gb"] = round(engine.memory_mb()["scheduler"] / 1024, 2)
    return result


def pair(mine: list[float], other: list[float], name: str) -> dict[str, float]:
    """Return the best figure of each side, and the factor by which ours is faster."""
    found = {"headrace": round(max(mine), 1)}
    if other:
        found[name] = round(max(other), 1)
        found["ratio"] = round(max(mine) / max(other), 2)
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPE_NAMES, default=DEFAULT_SHAPES)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--beside-adapter", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [asyncio.run(measure(shape, options)) for shape in options.shape]
    for result in results:
        print(f"\n{result['shape']}: ready in {result['ready_s']} s, {result['worker_rss_gb']} GB")
        for name, value in result.items():
            if isinstance(value, dict):
                print(f"  {name:14}" + "".join(f"  {k} {v:>9}" for k, v in value.items()))
    if options.json:
        write_json(options.json, {"machine": describe_environment(), "results": results})


if __name__ == "__main__":
    main()
