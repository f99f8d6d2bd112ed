"""Ten times the load that can be served: counted in steps, so that no clock decides."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from tests.support.scheduler_harness import Harness

ROWS, QUEUED, OUTPUT = 8, 16, 16
STEPS = 400
# Requests that the rows can take in a step; the overload is ten times as many.
CAPACITY = ROWS / OUTPUT
OFFERED = int(10 * CAPACITY)


def serve(folder: Path, overlap: bool, is_overloaded: bool) -> tuple[Harness, dict[int, int]]:
    """Run `STEPS` steps; return for each request the step before which it arrived."""
    harness = Harness(folder, rows=ROWS, max_queued=QUEUED, overlap=overlap)
    came: dict[int, int] = {}
    numbers = count(1)
    for step in range(STEPS):
        in_flight = len(came) - len(harness.reasons)
        for _ in range(OFFERED if is_overloaded else ROWS - in_flight):
            number = next(numbers)
            came[number] = step
            harness.add(number, [number % 50, number % 7, 3, 9, 11], OUTPUT, ignore_eos=True)
        before = set(harness.reasons)
        harness.scheduler.step()
        for number in set(harness.reasons) - before:
            if harness.reasons[number].status_code == 503:
                assert came[number] == step, "it was kept waiting for its refusal"
    return harness, came


@pytest.mark.parametrize("overlap", [False, True])
def test_accepted_requests_are_served_as_without_overload(tmp_path: Path, overlap: bool) -> None:
    for name in ("peak", "overload"):
        (tmp_path / name).mkdir()
    peak, _ = serve(tmp_path / "peak", overlap, is_overloaded=False)
    harness, came = serve(tmp_path / "overload", overlap, is_overloaded=True)
    goodput = [sum(map(len, each.tokens.values())) for each in (harness, peak)]
    assert goodput[0] >= 0.95 * goodput[1]

    refused = {n for n, reason in harness.reasons.items() if reason.status_code == 503}
    assert len(refused) > 0.8 * len(came)
    done = [n for n, reason in harness.reasons.items() if reason.type == "length"]
    assert all(len(harness.tokens[number]) == OUTPUT for number in done)
    # No request starves: they end in order of arrival, up to concurrent ones, and only the last
    # ones are unfinished.
    assert all(abs(place - number) < ROWS for place, number in enumerate_in_order(done))
    waiting = came.keys() - harness.reasons.keys()
    assert len(waiting) <= ROWS + QUEUED
    longest = (ROWS + QUEUED) / CAPACITY + 2 * OUTPUT
    assert min(came[number] for number in waiting) > STEPS - longest
    harness.run()


def enumerate_in_order(numbers: list[int]) -> list[tuple[int, int]]:
    """Return each number's sorted index, and its index in `numbers`."""
    rank = {number: place for place, number in enumerate(sorted(numbers))}
    return [(place, rank[number]) for place, number in enumerate(numbers)]
