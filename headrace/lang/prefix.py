"""Caches the prefix that all programs of a batch share, before their requests are sent.

The first two requests of the batch wait here until both are known; their common beginning is the
prefix. So no program needs to run twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from headrace.lang.forking import MIN_PREFIX_CHARS

if TYPE_CHECKING:
    from headrace.lang.backend.base import BaseBackend
    from headrace.lang.executor import StreamExecutor

# Seconds. The wait is limited, because the second program may itself wait for the first.
_TIMEOUT_S = 1.0


class PrefixGate:
    """Holds the first requests of a batch until their common text is cached."""

    def __init__(self, backend: BaseBackend) -> None:
        """Start with the gate closed."""
        self._backend = backend
        self._opened = asyncio.Event()
        self._first: str | None = None
        self._is_sending = False

    def ticket(self, executor: StreamExecutor) -> _Ticket:
        """Return an awaitable on which the executor's first request must wait."""
        return _Ticket(self, executor)

    def open(self) -> None:
        """Let all requests pass from now on; called on the frontend's event loop."""
        self._opened.set()

    async def arrive(self, executor: StreamExecutor) -> None:
        """Register the executor's first request, and wait until the common text is cached."""
        if self._opened.is_set():
            return
        if self._first is None:
            self._first = executor.text_
            asyncio.get_running_loop().call_later(_TIMEOUT_S, self._give_up)
        elif not self._is_sending:
            self._is_sending = True
            await self._send(_common_prefix(self._first, executor.text_))
        await self._opened.wait()

    def _give_up(self) -> None:
        if not self._is_sending:
            self.open()

    async def _send(self, prefix: str) -> None:
        try:
            if len(prefix) > MIN_PREFIX_CHARS:
                # An error is ignored, because the batch's own requests report the same error.
                with contextlib.suppress(Exception):
                    await self._backend.async_cache_prefix(prefix)
        finally:
            self.open()


def _common_prefix(one: str, other: str) -> str:
    differing = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[: next(differing, min(len(one), len(other)))]


class _Ticket:
    def __init__(self, gate: PrefixGate, executor: StreamExecutor) -> None:
        self._gate = gate
        self._executor = executor

    def __await__(self) -> Any:
        return self._gate.arrive(self._executor).__await__()
