"""Runs tasks that no code awaits, and handles the end of each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

# A task that fails so many times within `WITHIN_S` seconds is not started again.
MAX_FAILURES = 5
WITHIN_S = 60.0
_DELAY_S = 0.1


class Background:
    """Starts background tasks, restarts those that must never end, and reports failures."""

    def __init__(self, failed: Callable[[str], None]) -> None:
        """Begin without tasks; `failed` is called with a reason if a task cannot continue."""
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopped = False

    def keep(self, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> None:
        """Run `work`, which should never end; start it again if it ends.

        Args:
            work: makes the coroutine; it is called for each start.
            what: what the task does, for the log: "receiving from replica 0".
        """
        failures: deque[float] = deque(maxlen=MAX_FAILURES)

        def start() -> None:
            if not self._is_stopped:
                self._start(work(), ended)

        def ended(error: BaseException | None) -> None:
            how = "has ended" if error is None else "failed"
            logger.error("%s %s; it is started again", what, how, exc_info=error)
            failures.append(time.monotonic())
            if len(failures) == MAX_FAILURES and failures[-1] - failures[0] < WITHIN_S:
                self._failed(f"{what} failed {MAX_FAILURES} times within {WITHIN_S:.0f} s.")
            else:
                asyncio.get_running_loop().call_later(_DELAY_S, start)

        start()

    def run(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run `work` to its end; if it fails, call `failed`. `what` describes it for the log."""

        def ended(error: BaseException | None) -> None:
            if error is not None:
                logger.error("%s failed", what, exc_info=error)
                self._failed(f"{what} failed: {type(error).__name__}.")

        self._start(work, ended)

    async def stop(self) -> None:
        """Cancel all tasks, and wait until they have ended."""
        self._is_stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _start(
        self, work: Coroutine[Any, Any, None], ended: Callable[[BaseException | None], None]
    ) -> None:
        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                ended(task.exception())

        task = asyncio.create_task(work)
        # The event loop has only weak references to tasks, so this set keeps them alive.
        self._tasks.add(task)
        task.add_done_callback(done)
