"""Waits for conditions. Tests do not sleep anywhere else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_EVERY_S = 0.01


def until(
    condition: Callable[[], object], timeout_s: float = 60.0, what: object = "it never came to that"
) -> float:
    """Wait until a condition holds; return the seconds that this took.

    Args:
        condition: checked a hundred times a second.
        timeout_s: most time to wait, enough for a busy machine, seconds.
        what: message of the failure.
    """
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, what
        time.sleep(_EVERY_S)
    return time.monotonic() - started


async def until_in_loop(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until a condition holds, while the event loop runs."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 what it looks at has no event
            await asyncio.sleep(_EVERY_S)
