"""Arrivals, the limit on requests in flight, and requests that fail."""

import asyncio
import itertools
import math
import random
import time

import pytest

from headrace.bench.load import arrival_offsets, drive, run_at_once
from headrace.bench.record import BenchRequest, RequestRecord
from runtime.errors import HeadraceError
from tests.support.waiting import until_in_loop

REQUEST = BenchRequest(input_ids=[1], output_len=2)


class FakeTarget:
    """Takes a few turns of the loop for each request; every `fails_every`-th fails."""

    def __init__(self, fails_every: int = 0) -> None:
        self.fails_every = fails_every
        self.running = self.most = 0

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            if self.fails_every and record.index % self.fails_every == 0:
                raise ConnectionResetError("gone")
            record.output_tokens = request.output_len
        finally:
            self.running -= 1

    async def flush_cache(self) -> None:
        pass


def numbered(count: int, gap_s: float = 0.0) -> list[tuple[int, float, BenchRequest]]:
    return [(index, index * gap_s, REQUEST) for index in range(count)]


def test_poisson_arrivals_have_their_rate() -> None:
    offsets = arrival_offsets(5000, 50.0, random.Random(0))
    assert offsets[0] == 0.0
    assert offsets == sorted(offsets)
    gaps = [after - before for before, after in itertools.pairwise(offsets)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 50, rel=0.1)
    # An exponential gap spreads as far as its mean.
    assert spread == pytest.approx(mean, rel=0.1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert arrival_offsets(3, math.inf, random.Random(0)) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("limit", "most"), [(3, 3), (None, 20), (50, 20)])
async def test_no_more_are_in_flight_than_allowed(limit: int | None, most: int) -> None:
    target = FakeTarget()
    done: list[int] = []
    records = await drive(
        numbered(20), target, max_concurrency=limit, on_done=lambda r: done.append(r.index)
    )
    assert target.most == most
    assert [record.index for record in records] == list(range(20))
    assert sorted(done) == list(range(20))
    assert all(record.finished >= record.started > 0 for record in records)


async def test_requests_wait_for_their_time() -> None:
    begun = time.perf_counter()
    records = await drive(numbered(3, gap_s=0.02), FakeTarget())
    # A busy machine starts requests late, never early.
    assert all(record.started - begun >= 0.02 * i - 0.001 for i, record in enumerate(records))


async def test_a_failed_request_fails_alone() -> None:
    records = await drive(numbered(6), FakeTarget(fails_every=3), max_concurrency=2)
    assert [bool(record.error) for record in records] == [True, False, False] * 2


async def test_a_batch_that_must_be_whole_says_what_failed() -> None:
    with pytest.raises(HeadraceError, match="1 of 2 requests failed; the first: gone"):
        await run_at_once([REQUEST] * 2, FakeTarget(fails_every=2))


async def test_leaving_early_leaves_nothing_behind() -> None:
    target = FakeTarget()
    task = asyncio.create_task(drive(numbered(4, gap_s=10.0), target))
    # The first is answered at once, the second is due in ten seconds.
    await until_in_loop(lambda: target.most and not target.running)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert target.running == 0
