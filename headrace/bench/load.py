"""Sends requests at given times, one task per request, with a limit on requests in flight."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.bench.record import BenchRequest, RequestRecord
from runtime.errors import HeadraceError

OnDone = Callable[[RequestRecord], None]


class Target(Protocol):
    """The measured system: an engine, or a server behind a URL."""

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Send one request and fill in `record`; a raised error marks it as failed."""
        ...

    async def flush_cache(self) -> None:
        """Drop the prefix cache."""
        ...


def arrival_offsets(count: int, request_rate: float, rng: random.Random) -> list[float]:
    """Return for each request the seconds after the start at which it is sent.

    Args:
        count: number of requests.
        request_rate: mean requests per second of a Poisson process; infinity sends all at once.
        rng: draws the time between requests.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    offsets: list[float] = []
    now = 0.0
    for _ in range(count):
        offsets.append(now)
        now += rng.expovariate(request_rate)
    return offsets


async def drive(
    requests: Sequence[tuple[int, float, BenchRequest]],
    target: Target,
    *,
    start: float | None = None,
    max_concurrency: int | None = None,
    on_done: OnDone | None = None,
) -> list[RequestRecord]:
    """Send every request at its time, wait for all answers, and return the requests' records.

    Args:
        requests: for each request its index, its time in seconds after the start, and the request;
            in the order of their times.
        target: receives the requests.
        start: the start, in seconds of `time.perf_counter()`; by default now.
        max_concurrency: most requests in flight. Later requests wait, and their measured time
            begins when they are sent.
        on_done: called with each complete record.
    """
    begin = time.perf_counter() if start is None else start
    # Without a limit, the semaphore's bound is the number of requests, which is never exceeded.
    slots = asyncio.Semaphore(max_concurrency or len(requests) or 1)

    async def one(index: int, request: BenchRequest) -> RequestRecord:
        record = RequestRecord(index=index, prompt_tokens=request.prompt_len)
        try:
            record.started = time.perf_counter()
            await target.send(request, record)
        except (HeadraceError, OSError, TimeoutError) as error:
            record.error = str(error) or type(error).__name__
        finally:
            record.finished = time.perf_counter()
            slots.release()
        if on_done is not None:
            on_done(record)
        return record

    tasks: list[asyncio.Task[RequestRecord]] = []
    try:
        for index, offset, request in requests:
            delay = begin + offset - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            await slots.acquire()
            tasks.append(asyncio.create_task(one(index, request)))
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def run_at_once(requests: Sequence[BenchRequest], target: Target) -> list[RequestRecord]:
    """Send all requests together, wait for all answers, and return the requests' records.

    Raises:
        HeadraceError: a request failed. A figure without this request would be meaningless.
    """
    numbered = [(index, 0.0, request) for index, request in enumerate(requests)]
    records = await drive(numbered, target)
    failed = [record for record in records if record.error]
    if failed:
        raise HeadraceError(
            f"{len(failed)} of {len(records)} requests failed; the first: {failed[0].error}"
        )
    return records
