"""`headrace bench latency` measures the time of one batch from start to end, repeatedly."""

from __future__ import annotations

import argparse
import random
import sys
import time
from contextlib import closing
from functools import partial
from typing import Any

from headrace.bench.bench_options import add_batch_options, check_batch_options
from headrace.bench.datasets import TokenSource, random_requests
from headrace.bench.driver import Benchmark, Run
from headrace.bench.engine_target import EngineTarget, measure_engine
from headrace.bench.load import run_at_once
from headrace.bench.progress import Progress
from headrace.bench.record import distribution


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to a parser."""
    parser.add_argument("--batch-size", type=int, default=1, metavar="N")
    add_batch_options(parser, output_len=64, num_iters=10, num_warmup=2)
    parser.add_argument("--no-progress", action="store_true")


def measure(run: Run) -> int:
    """Measure the time of each batch, print the figures, and return the exit status 0.

    Raises:
        HeadraceError: the engine cannot start, or a request failed.
    """
    options = run.options
    check_batch_options(options)
    result = measure_engine(run, partial(_batches, options=options))
    run.say(f"batch of {options.batch_size}, {options.input_len} in, {options.output_len} out")
    for name, title in (
        ("latency_ms", "whole batch, ms"),
        ("ttft_ms", "to the last first token, ms"),
        ("decode_tok_per_s", "tokens/s after that"),
    ):
        if values := result[name]:
            run.say(f"{title:29}" + "".join(f"  {key} {x:.2f}" for key, x in values.items()))
    run.write(result)
    return 0


async def _batches(engine: EngineTarget, options: argparse.Namespace) -> dict[str, Any]:
    source = TokenSource(random.Random(options.seed), engine.vocab_size)
    latencies, firsts, rates = [], [], []
    with closing(Progress(options.num_iters, enabled=not options.no_progress)) as progress:
        for iteration in range(-options.num_iters_warmup, options.num_iters):
            batch = random_requests(
                source, options.batch_size, options.input_len, options.output_len
            )
            started = time.perf_counter()
            records = await run_at_once(batch, engine)
            ended = max(record.finished for record in records)
            if iteration < 0:
                continue
            progress.add()
            first = max(record.event_times[0] for record in records)
            # The decode rate is measured while all requests run. Tokens that came before the last
            # request had its first token are not counted.
            num_later = sum(
                count
                for record in records
                for when, count in zip(record.event_times, record.event_tokens, strict=True)
                if when > first
            )
            latencies.append((ended - started) * 1e3)
            firsts.append((first - started) * 1e3)
            if num_later:
                rates.append(num_later / (ended - first))
    return {
        "ready_s": engine.start_s,
        "latency_ms": distribution(latencies),
        "ttft_ms": distribution(firsts),
        "decode_tok_per_s": distribution(rates),
        "latencies_ms": latencies,
        "memory_mb": engine.memory_mb(),
    }


LATENCY = Benchmark(
    "latency", "Time of one batch from start to end, without HTTP.", add_options, measure
)
main = LATENCY.main

if __name__ == "__main__":
    sys.exit(main())
