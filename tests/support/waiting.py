"""Waits for events and conditions. Tests do not sleep anywhere else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_EVERY_S = 0.01


def until(
    condition: Callable[[], object], timeout_s: float = 60.0, what: object = "it never came to that"
) -> float:
    """Wait until `condition` holds; return the seconds that it took.

    Args:
        condition: checked a hundred times a second.
        timeout_s: how long a busy machine may take.
        what: text of the failure.
    """
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, what
        time.sleep(_EVERY_S)
    return time.monotonic() - started


async def until_in_loop(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Do the same as `until`, while the event loop continues."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 what it looks at has no event
            await asyncio.sleep(_EVERY_S)
