"""A stalled loop is reported once for each interval that it missed."""

from __future__ import annotations

import asyncio
import time

from server.loop_lag import INTERVAL_S, measure
from tests.support.waiting import until_in_loop


async def test_a_stall_counts_for_every_turn_that_it_held_up() -> None:
    observed: list[float] = []
    task = asyncio.create_task(measure(observed.append))
    await until_in_loop(lambda: bool(observed))
    before = len(observed)
    end = time.monotonic() + 10.5 * INTERVAL_S
    while time.monotonic() < end:
        pass
    await until_in_loop(lambda: len(observed) > before)
    task.cancel()
    stalled = observed[before:]
    # The first turn came due within the stall's first interval.
    assert stalled[0] >= 9 * INTERVAL_S
    assert len(stalled) >= 10
    assert all(lag >= 0 for lag in observed)
