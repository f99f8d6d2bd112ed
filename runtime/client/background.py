"""Tasks of the event loop that nobody awaits: none of them ends without being noticed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

# A task that fails this often within the time will not do better the next time.
MAX_FAILURES = 5
WITHIN_S = 60.0
_DELAY_S = 0.1


class Background:
    """Starts tasks, keeps those running that must never end, and tells of those that cannot."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        """Call `failed` with one line when something cannot go on."""
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
        """Run `work`, which has no end, and start it again when it ends all the same.

        Args:
            work: makes the coroutine; called again after each failure.
            what: for the log, as "receiving from replica 0".
        """
        self._start(self._keep(work, what))

    def run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run `work` to its end; that it fails is a failure of the engine."""
        self._start(self._once(work, what))

    async def stop(self) -> None:
        """Cancel everything, and wait until it has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        # The loop itself holds tasks weakly.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
        failures: deque[float] = deque(maxlen=MAX_FAILURES)
        while True:
            try:
                await work()
                logger.error("%s has ended; it goes on.", what)
            except Exception:
                logger.exception("%s failed; it goes on", what)
            failures.append(time.monotonic())
            if len(failures) == MAX_FAILURES and failures[-1] - failures[0] < WITHIN_S:
                self._failed(f"{what} failed {MAX_FAILURES} times within {WITHIN_S:.0f} s.")
                return
            await asyncio.sleep(_DELAY_S)

    async def _once(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await work
        except Exception as error:
            logger.exception("%s failed", what)
            self._failed(f"{what} failed: {type(error).__name__}.")
