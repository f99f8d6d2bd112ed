"""Finds out whether a silent server still runs, by a small request while another one waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# Seconds of silence after which the server is asked. A generation may be silent for any time, but a
# running server answers a small request meanwhile.
QUIET_S = 2.0
ANSWER_S = 4.0
_TRIES = 2
_SHORT_S = 0.2


class Presence:
    """Checks that one server still runs, for all requests that wait for this server."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        *,
        quiet_s: float = QUIET_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Store the settings; the server is not asked yet.

        Args:
            ask: function that sends a request which a running server answers at once; any answer
                shows that the server runs.
            quiet_s: seconds of silence after which the server is asked.
            answer_s: seconds that the server has for its answer, in each of two tries.
        """
        self._ask = ask
        self._quiet_s = quiet_s
        self._answer_s = answer_s
        self._heard_at = -quiet_s
        # Once the server is gone, later requests fail without waiting again.
        self._is_gone = False
        self._asking: asyncio.Task[None] | None = None

    def hear(self) -> None:
        """Note that the server has just sent data, so it runs."""
        self._heard_at = time.monotonic()
        self._is_gone = False

    async def while_there(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that waits for the server, and return its result.

        Raises:
            TimeoutError: the server no longer answers; `work` is cancelled.
            Exception: an exception that `work` raised.
        """
        task = asyncio.create_task(work)
        try:
            while True:
                quiet_s = _SHORT_S if self._is_gone else self._quiet_s
                done, _ = await asyncio.wait({task}, timeout=quiet_s)
                if done:
                    result = task.result()
                    self.hear()
                    return result
                if time.monotonic() - self._heard_at >= self._quiet_s:
                    await self._answered()
        finally:
            task.cancel()

    async def _answered(self) -> None:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._try())
        # Several requests wait for the same answer, so a cancelled one must not cancel the
        # question.
        await asyncio.shield(self._asking)

    async def _try(self) -> None:
        for _ in range(1 if self._is_gone else _TRIES):
            try:
                async with asyncio.timeout(self._answer_s):
                    await self._ask()
            except OSError:
                continue
            self.hear()
            return
        self._is_gone = True
        raise TimeoutError("the server no longer answers")
