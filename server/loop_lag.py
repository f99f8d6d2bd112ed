"""How late the event loop is: what a probe or a stream that becomes ready has to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

INTERVAL_S = 0.1
# After a stall of minutes the newest turns are enough to tell.
_MOST_MISSED = 600


async def measure(observe: Callable[[float], object]) -> None:
    """Tell `observe` every tenth of a second by how many seconds the loop was late.

    A stall of a second is told ten times, once for each turn that it held up, so that shares of
    time can be read from the counts.
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
