"""Measures the time that explanations of requests cost the scheduler and the front.

    python -m benchmarks.explain_cost [--rounds 40] [--requests 64] [--tokens 64] [--json FILE]

The worker's part runs the real scheduler, cache and planner with a model that takes no time, so its
figures are microseconds of scheduling alone. For `without`, the functions that record times are
replaced by functions that do nothing. Rounds with and without alternate, and the minimum of each is
compared, because other load on the machine only adds time. The front's part, which also joins both
halves of an explanation, is measured alone, for one request.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from headrace.bench.environment import describe_environment, write_json
from runtime.cache.manager import CacheManager
from runtime.client.request_history import RequestHistory, RequestTrace
from runtime.ipc.messages import BeginTimes, GenerateRequest
from runtime.ipc.time_messages import ChunkTime, PrefixBreak, RequestTimes, Wait, WorkerTimes
from runtime.requests.arrival import ARRIVAL, Arrival, timed
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduler.step_clock import StepClock, StepNote, TimeRecord
from tests.support.scheduler_harness import Harness

PROMPT = 40


@contextlib.contextmanager
def _without() -> Iterator[None]:
    """Replace the functions of the scheduler that record times by functions that do nothing."""

    def ignore(*args: Any, **options: Any) -> None:
        del args, options

    note = StepNote(0.0)

    # A mock would take more time than the function that it replaces.
    def plan(*args: Any) -> StepNote:
        del args
        return note

    def look_up(*args: Any) -> tuple[None, bool]:
        del args
        return None, False

    with contextlib.ExitStack() as stack:
        for name in ("queued", "skipped", "passed", "admitted", "chunk", "prompt_done", "ended"):
            stack.enter_context(mock.patch.object(TimeRecord, name, ignore))
        stack.enter_context(mock.patch.object(StepClock, "stepped", ignore))
        stack.enter_context(mock.patch.object(StepClock, "planned", plan))
        stack.enter_context(mock.patch.object(CacheManager, "prefix_break", look_up))
        yield


def schedule(folder: Path, num_requests: int, num_tokens: int) -> float:
    """Return the process time to run all requests to their end, in seconds."""
    # Prompts share their first page, as those of one application do.
    pages = num_requests * -(-(PROMPT + num_tokens) // 4) + num_requests
    harness = Harness(
        folder,
        rows=num_requests,
        num_pages=pages,
        context_len=PROMPT + num_tokens + 1,
        token_budget=256,
    )
    for each in range(1, num_requests + 1):
        ids = [7, 7, 7, 7, *((each * 31 + at) % 200 + 1 for at in range(PROMPT - 4))]
        harness.add(each, ids, num_tokens, ignore_eos=True)
    begin = time.process_time()
    while harness.scheduler.has_work:
        harness.scheduler.step()
    return time.process_time() - begin


def front(num_requests: int) -> float:
    """Return the process time of the front's part for one request, its end included, in seconds."""
    history = RequestHistory()
    spec = RequestSpec(row=RowSpec(sampling=SamplingParams(max_new_tokens=8, seed=1)))
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(RequestTimes)
    prompt, output = b"\0" * 2048, b"\0" * 256
    now = time.monotonic()
    times = WorkerTimes(0, now, now, now, now, now, [0.0] * len(Wait), [ChunkTime(0, 512, now)])
    times.prefix = PrefixBreak(100, differs=True)
    begin = time.process_time()
    for each in range(num_requests):
        arrival = Arrival("id")
        ARRIVAL.set(arrival)
        for work in ("body", "parse", "render", "tokenize"):
            with timed(work):
                pass
        request = GenerateRequest(each, prompt, spec, arrival.began_at)
        trace = RequestTrace(request, ("", str(each)), 512)
        history.begin(trace)
        trace.sent()
        trace.began(BeginTimes(now, now))
        times.request_id = each
        history.on_times(decoder.decode(encoder.encode(RequestTimes([times]))).ended)
        trace.outcome = "stop"
        history.end(trace, output)
    return (time.process_time() - begin) / num_requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spent: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            spent["with"].append(schedule(Path(folder), args.requests, args.tokens))
            with _without():
                spent["without"].append(schedule(Path(folder), args.requests, args.tokens))
    least = {kind: min(each) for kind, each in spent.items()}
    num_tokens = args.requests * args.tokens
    results = {
        "scheduler_us_per_token": {kind: 1e6 * each / num_tokens for kind, each in least.items()},
        "scheduler_added_us_per_token": 1e6 * (least["with"] - least["without"]) / num_tokens,
        "front_us_per_request": 1e6 * min(front(2000) for _ in range(5)),
    }
    for name, value in results.items():
        print(f"{name:<32} {value}")
    if args.json is not None:
        write_json(args.json, {"environment": describe_environment(), **results})


if __name__ == "__main__":
    main()
