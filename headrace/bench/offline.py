"""`headrace bench offline`: throughput of many requests through the engine, without HTTP.

The engine runs in its usual processes; requests are all there at once, as in a batch job.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

import uvloop

from headrace.bench.datasets import TokenSource, add_dataset_options, make_requests
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
from headrace.bench.load import drive, run_at_once
from headrace.bench.progress import Progress
from headrace.bench.record import BenchRequest, RequestRecord, summarize
from headrace.bench.report import summary_lines
from runtime.errors import HeadraceError

_WARM_UP_TOKENS = 4


def build_parser() -> argparse.ArgumentParser:
    """The options, without the server's."""
    parser = engine_parser(
        "headrace bench offline", "Throughput of many requests through the engine, without HTTP."
    )
    add_dataset_options(parser)
    parser.add_argument(
        "--stream",
        action="store_true",
        help="have tokens handed over as they come, for latencies; else each answer is one piece",
    )
    parser.add_argument("--no-warmup", action="store_true", help="count the first steps as well")
    parser.add_argument("--no-progress", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 when it could not or when a request failed."""
    options, server_options = build_parser().parse_known_args(argv)
    try:
        check_writable("--output-file", options.output_file)
        with engine_config(options.shape, server_options) as config:

            async def run() -> tuple[EngineTarget, list[RequestRecord]]:
                async with running_engine(config, stream=options.stream) as engine:
                    source = TokenSource(random.Random(options.seed), engine.vocab_size)
                    requests = make_requests(options, source)
                    if not options.no_warmup:
                        await _warm_up(engine, source, requests)
                    return engine, await _measure(engine, requests, options)

            engine, records = uvloop.run(run())
    except HeadraceError as error:
        return fail(error.message)
    except KeyboardInterrupt:
        return 130
    summary = summarize(records)
    if not options.stream:
        # One piece an answer has no first token.
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            summary.pop(name)
    print(environment_line(describe_environment()))
    print(f"ready         in {engine.start_s:.2f} s")
    print("\n".join(summary_lines(summary)), flush=True)
    if options.output_file is not None:
        result = {"ready_s": engine.start_s, **summary}
        write_json(options.output_file, result_file("offline", options, server_options, result))
    return 1 if summary["num_failed"] else 0


async def _warm_up(
    engine: EngineTarget, source: TokenSource, requests: Sequence[BenchRequest]
) -> None:
    # As many at once and prompts as long, so that whatever is compiled or captured is there; with
    # tokens of their own, so that the cache does not know the prompts that count.
    lengths = [max(1, request.prompt_len) for request in requests]
    await run_at_once(
        [source.request(source.ids(length), _WARM_UP_TOKENS) for length in lengths], engine
    )
    await engine.flush_cache()


async def _measure(
    engine: EngineTarget, requests: Sequence[BenchRequest], options: argparse.Namespace
) -> list[RequestRecord]:
    progress = Progress(len(requests), enabled=not options.no_progress)
    numbered = [(index, 0.0, request) for index, request in enumerate(requests)]
    try:
        return await drive(numbered, engine, on_done=lambda _: progress.add())
    finally:
        progress.close()


if __name__ == "__main__":
    sys.exit(main())
