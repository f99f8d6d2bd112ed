"""Measures what host memory saves for conversations that do not fit into the KV cache.

    python -m benchmarks.host_tier
    python -m benchmarks.host_tier --device cuda --shape 8b --conversations 200 --tokens 2500
        --share 0.2 --streams 16

The weights of a shape are random, and the worker runs in this process. Each conversation has a
first turn, and later a second turn of a few tokens. Streams generate text meanwhile. Three servers
get the same requests:

- `fits`: the KV cache has room for all conversations;
- `host`: the KV cache has room for a share of them, and host memory for all
  (`--enable-hierarchical-cache`);
- `computed`: the KV cache has room for the same share, without host memory, so most prompts are
  computed again.

The report has the times to the first token of the second turns. It also has the streams' tokens per
second, from the first of these turns to the last, and when the streams run alone.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.environment import describe_environment, write_json
from headrace.bench.shapes import SHAPES, write_shape
from tests.support.engine import InProcessEngine

_NEW_TOKENS, _ANSWER = 24, 4
_ALONE_STEPS = 64
_PAGE = 16
WAYS = ("fits", "host", "computed")


class Run:
    """One server with its conversations and streams."""

    def __init__(self, folder: Path, vocab_size: int, args: argparse.Namespace, way: str) -> None:
        self._args = args
        rng = np.random.default_rng(0)
        self._histories = [
            rng.integers(3, vocab_size, args.tokens).tolist() for _ in range(args.conversations)
        ]
        self._added = rng.integers(3, vocab_size, (args.rounds, _NEW_TOKENS)).tolist()
        of_one = args.tokens + args.rounds * (_NEW_TOKENS + _ANSWER) + 2 * _PAGE
        of_all = args.conversations * of_one
        of_streams = args.streams * args.stream_tokens
        pool = of_all if way == "fits" else int(of_all * args.share)
        self.engine = InProcessEngine(
            folder,
            device=args.device,
            dtype="bfloat16",
            kv_cache_dtype=args.kv_cache_dtype,
            load_format="dummy",
            context_len=max(of_one, args.stream_tokens) + _PAGE,
            page_size=_PAGE,
            max_total_tokens=pool + of_streams,
            max_running_requests=args.streams + 8,
            chunked_prefill_size=args.chunk,
            overlap=args.device == "cuda",
            num_threads=args.threads,
            host_pool_ratio=1.2 * of_all / (pool + of_streams) if way == "host" else 0.0,
        )
        self._next_id = args.streams + 1

    def measure(self) -> dict[str, Any]:
        """Return the times and the rates of this server."""
        engine, args = self.engine, self._args
        for index, history in enumerate(self._histories):
            self._histories[index] = history + self._ask(history)[1]
        for stream in range(1, args.streams + 1):
            engine.add(stream, [7 + stream, 8, 9], args.stream_tokens - 8, ignore_eos=True)
        while len(self._streamed()) < args.streams:
            engine.scheduler.step()
        alone = self._rate(lambda: [engine.scheduler.step() for _ in range(_ALONE_STEPS)])
        turns: list[tuple[float, float]] = []
        beside = self._rate(lambda: turns.extend(self._go_on()))
        assert len(engine.reasons) == self._next_id - args.streams - 1, "a stream ended early"
        times, found = np.array(turns).T
        return {
            "ttft_s": {f"p{q}": float(np.percentile(times, q)) for q in (50, 90, 99)},
            "found": float(found.mean()),
            "streams_alone": alone,
            "streams": beside,
            "from_host": engine.shared["load_back_tokens_total"],
        }

    def _go_on(self) -> list[tuple[float, float]]:
        """Run the second turns; return each one's time to the first token and cached share."""
        turns = []
        for added in self._added:
            for index, history in enumerate(self._histories):
                prompt = history + added
                ttft, answer = self._ask(prompt)
                turns.append((ttft, self.engine.cached[self._next_id - 1] / len(prompt)))
                self._histories[index] = prompt + answer
                # A client needs some time before its next turn.
                for _ in range(self._args.steps_between):
                    self.engine.scheduler.step()
        return turns

    def _ask(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Return the time to the first token, and the answer."""
        engine, number = self.engine, self._next_id
        self._next_id += 1
        started = time.perf_counter()
        engine.add(number, prompt, _ANSWER, ignore_eos=True)
        while not engine.tokens.get(number):
            engine.scheduler.step()
        ttft = time.perf_counter() - started
        while number not in engine.reasons:
            engine.scheduler.step()
        return ttft, engine.tokens[number]

    def _streamed(self) -> list[int]:
        streams = range(1, self._args.streams + 1)
        return [n for i in streams if (n := len(self.engine.tokens.get(i, [])))]

    def _rate(self, work: Any) -> float:
        """Return the streams' tokens per second while `work` runs."""
        before, started = sum(self._streamed()), time.perf_counter()
        work()
        return (sum(self._streamed()) - before) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=1500, help="of each conversation")
    parser.add_argument("--share", type=float, default=0.2, help="of them that fits into the pool")
    parser.add_argument("--rounds", type=int, default=2, help="turns that are measured")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--stream-tokens", type=int, default=4000)
    parser.add_argument("--steps-between", type=int, default=12, help="steps between two requests")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=WAYS, help="which of the servers"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = write_shape(args.shape, Path(name) / args.shape)
        for way in args.ways:
            run = Run(folder, SHAPES[args.shape]["vocab_size"], args, way)
            results[way] = found = run.measure()
            del run
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            ttft = found["ttft_s"]
            print(
                f"{way:9} first token p50 {ttft['p50'] * 1e3:.0f} p90 {ttft['p90'] * 1e3:.0f} "
                f"p99 {ttft['p99'] * 1e3:.0f} ms; {found['found']:.0%} of the prompts found; "
                f"streams {found['streams']:.0f} tokens/s, alone {found['streams_alone']:.0f}",
                flush=True,
            )
    if args.json:
        options = {key: value for key, value in vars(args).items() if key != "json"}
        write_json(args.json, {**describe_environment(), "options": options, "results": results})


if __name__ == "__main__":
    main()
