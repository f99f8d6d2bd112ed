"""Finds out whether a silent server still runs, with a question beside the request that waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

# A generation may be silent for any time, but a running server answers a small question meanwhile.
QUIET_S = 2.0
ANSWER_S = 4.0
_TRIES = 2
_SHORT_S = 0.2


class Presence:
    """Watches one server for all requests that wait for it."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[object]],
        *,
        quiet_s: float = QUIET_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Store the settings; the server is not asked yet.

        Args:
            ask: asks a question that a running server answers at once. Any answer is enough.
            quiet_s: seconds of silence after which the server is asked.
            answer_s: seconds that the server has for its answer, in each of two tries.
        """
        self._ask = ask
        self._quiet_s = quiet_s
        self._answer_s = answer_s
        self._heard_at = -quiet_s
        # A later request learns at once that the server is gone.
        self._is_gone = False
        self._asking: asyncio.Task[None] | None = None

    def hear(self) -> None:
        """Note that data came from the server."""
        self._heard_at = time.monotonic()
        self._is_gone = False

    async def while_there(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, which waits for the server.

        Raises:
            TimeoutError: the server has gone; `work` is cancelled.
            Exception: whatever `work` raises.
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
        # Other requests wait for the same answer, so the question is not cancelled.
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
