"""`headrace bench offline`: throughput of many requests through the engine, without HTTP.

The engine runs in its usual processes; all requests arrive at once, as in a batch job.
"""

from __future__ import annotations

import argparse
import random
import sys
from contextlib import closing
from functools import partial

from headrace.bench.datasets import TokenSource, add_dataset_options, make_requests
from headrace.bench.driver import Benchmark, Run
from headrace.bench.engine_target import EngineTarget, measure_engine
from headrace.bench.load import drive, run_at_once
from headrace.bench.progress import Progress
from headrace.bench.record import RequestRecord, summarize
from headrace.bench.report import summary_lines

_WARM_UP_TOKENS = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to a parser."""
    add_dataset_options(parser)
    parser.add_argument(
        "--stream",
        action="store_true",
        help="stream tokens, to measure latencies; otherwise each answer is one piece",
    )
    parser.add_argument("--no-warmup", action="store_true", help="do not run a warm-up first")
    parser.add_argument("--no-progress", action="store_true")


def measure(run: Run) -> int:
    """Send all requests at once, print the figures, and return 1 if a request failed.

    Raises:
        HeadraceError: the engine cannot start, or the requests cannot be generated.
    """
    stream = run.options.stream
    ready_s, records = measure_engine(run, partial(_send, options=run.options), stream=stream)
    summary = summarize(records)
    if not stream:
        # Without streaming an answer is one piece, so these latencies are not defined.
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            summary.pop(name)
    run.say(f"ready         in {ready_s:.2f} s", *summary_lines(summary))
    run.write({"ready_s": ready_s, **summary})
    return 1 if summary["num_failed"] else 0


async def _send(
    engine: EngineTarget, options: argparse.Namespace
) -> tuple[float, list[RequestRecord]]:
    source = TokenSource(random.Random(options.seed), engine.vocab_size)
    requests = make_requests(options, source)
    if not options.no_warmup:
        # The warm-up has as many requests with prompts of the same lengths, so that all kernels are
        # compiled and all graphs captured. Its tokens differ, so that the measured prompts are not
        # in the prefix cache.
        lengths = [max(1, request.prompt_len) for request in requests]
        await run_at_once(
            [source.request(source.ids(length), _WARM_UP_TOKENS) for length in lengths], engine
        )
        await engine.flush_cache()
    numbered = [(index, 0.0, request) for index, request in enumerate(requests)]
    with closing(Progress(len(requests), enabled=not options.no_progress)) as progress:
        records = await drive(numbered, engine, on_done=lambda _: progress.add())
    return engine.start_s, records


OFFLINE = Benchmark(
    "offline",
    "Throughput of many requests through the engine, without HTTP.",
    add_options,
    measure,
)
main = OFFLINE.main

if __name__ == "__main__":
    sys.exit(main())
