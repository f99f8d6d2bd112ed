"""Measures the event loop's lag: how late it runs a task that is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.1
# The most intervals that are reported after a stall; 600 are a minute.
_MOST_MISSED = 600


async def measure(observe: Callable[[float], object]) -> None:
    """Report the loop's lag, in seconds, to `observe` every tenth of a second.

    A stall of a second is reported ten times, once for each interval that it delayed. So in a
    histogram, a long stall counts in proportion to its duration.
    """
    loop = asyncio.get_running_loop()
    due = loop.time() + INTERVAL_S
    while True:
        await asyncio.sleep(max(due - loop.time(), 0.0))
        lag_s = max(loop.time() - due, 0.0)
        num_missed = min(int(lag_s / INTERVAL_S), _MOST_MISSED)
        for turn in range(num_missed + 1):
            observe(lag_s - turn * INTERVAL_S)
        due = max(due + (num_missed + 1) * INTERVAL_S, loop.time())
