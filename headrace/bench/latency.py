"""`headrace bench latency`: one batch from start to end, again and again, without HTTP."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import uvloop

from headrace.bench.datasets import TokenSource, random_requests
from headrace.bench.engine import EngineTarget, engine_config, running_engine
from headrace.bench.engine_options import engine_parser
from headrace.bench.environment import (
    check_writable,
    describe_environment,
    environment_line,
    fail,
    result_file,
    write_json,
)
from headrace.bench.load import run_at_once
from headrace.bench.progress import Progress
from headrace.bench.record import distribution
from runtime.errors import HeadraceError, StartupError


def build_parser() -> argparse.ArgumentParser:
    """The options, without the server's."""
    parser = engine_parser(
        "headrace bench latency", "Time of one batch from start to end, without HTTP."
    )
    parser.add_argument("--batch-size", type=int, default=1, metavar="N")
    parser.add_argument("--input-len", type=int, default=512, metavar="N")
    parser.add_argument("--output-len", type=int, default=64, metavar="N")
    parser.add_argument("--num-iters", type=int, default=10, metavar="N", help="counted batches")
    parser.add_argument("--num-iters-warmup", type=int, default=2, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-progress", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when it could not."""
    options, server_options = build_parser().parse_known_args(argv)
    try:
        check_writable("--output-file", options.output_file)
        for name in ("batch_size", "input_len", "output_len", "num_iters"):
            if getattr(options, name) < 1:
                raise StartupError(f"--{name.replace('_', '-')} must be at least 1.")
        with engine_config(options.shape, server_options) as config:

            async def run() -> dict[str, Any]:
                async with running_engine(config) as engine:
                    return await _measure(engine, options)

            result = uvloop.run(run())
    except HeadraceError as error:
        return fail(error.message)
    except KeyboardInterrupt:
        return 130
    print(environment_line(describe_environment()))
    print(f"batch of {options.batch_size}, {options.input_len} in, {options.output_len} out")
    for name, title in (
        ("latency_ms", "whole batch, ms"),
        ("ttft_ms", "to the last first token, ms"),
        ("decode_tok_per_s", "tokens/s after that"),
    ):
        values = result[name]
        if values:
            print(f"{title:29}" + "".join(f"  {key} {x:.2f}" for key, x in values.items()))
    if options.output_file is not None:
        write_json(options.output_file, result_file("latency", options, server_options, result))
    return 0


async def _measure(engine: EngineTarget, options: argparse.Namespace) -> dict[str, Any]:
    source = TokenSource(random.Random(options.seed), engine.vocab_size)
    progress = Progress(options.num_iters, enabled=not options.no_progress)
    latencies, firsts, rates = [], [], []
    for iteration in range(-options.num_iters_warmup, options.num_iters):
        batch = random_requests(source, options.batch_size, options.input_len, options.output_len)
        started = time.perf_counter()
        records = await run_at_once(batch, engine)
        ended = max(record.finished for record in records)
        if iteration < 0:
            continue
        progress.add()
        first = max(record.event_times[0] for record in records)
        # Tokens of streams that began earlier do not count: only the full batch is of interest.
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
    progress.close()
    return {
        "ready_s": engine.start_s,
        "latency_ms": distribution(latencies),
        "ttft_ms": distribution(firsts),
        "decode_tok_per_s": distribution(rates),
        "latencies_ms": latencies,
        "memory_mb": engine.memory_mb(),
    }


if __name__ == "__main__":
    sys.exit(main())
