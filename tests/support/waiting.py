"""Waiting for what happens. Tests sleep nowhere else: an event or a condition ends each wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

_EVERY_S = 0.01


def until(
    condition: Callable[[], object], timeout_s: float = 60.0, what: object = "it never came to that"
) -> float:
    """Wait until `condition` holds; the seconds it took.

    Args:
        condition: asked a hundred times a second.
        timeout_s: how long a busy machine may take.
        what: said by the failure.
    """
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, what
        time.sleep(_EVERY_S)
    return time.monotonic() - started


async def until_in_loop(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """`until`, while the event loop goes on."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 what it looks at has no event
            await asyncio.sleep(_EVERY_S)
