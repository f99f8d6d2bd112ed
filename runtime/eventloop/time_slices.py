"""Long work that has to stay on the event loop is cut into slices, one of them a turn of the loop.

However many requests have such work, the loop is held for one slice between two looks at its
sockets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Self
from weakref import WeakKeyDictionary

# How long a slice goes on before it ends, seconds: a tenth of what a probe may wait.
SLICE_S = 0.002
# Bytes after which a slice ends all the same: about what a socket takes at once.
SLICE_BYTES = 256 * 1024

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class Slices:
    """A context for long work; `step` is awaited between its small parts.

    While a slice goes on no other begins. Short work passes through as if this were not there.
    """

    def __init__(self, *, is_long: bool = True) -> None:
        """Begin with the context."""
        self._is_long = is_long
        self._lock: asyncio.Lock | None = None
        self._end = 0.0

    async def __aenter__(self) -> Self:
        if self._is_long:
            await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._release()

    async def step(self) -> None:
        """End the slice if its time is over, and wait for the turn of the next."""
        if self._is_long and time.monotonic() >= self._end:
            self._release()
            await self._begin()

    async def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        lock = _locks.get(loop)
        if lock is None:
            lock = _locks[loop] = asyncio.Lock()
        await lock.acquire()
        self._lock = lock
        self._end = time.monotonic() + SLICE_S

    def _release(self) -> None:
        if self._lock is not None:
            # Not now: whoever waits goes on after the loop has looked at its sockets.
            asyncio.get_running_loop().call_soon(self._lock.release)
            self._lock = None


async def in_turns(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The same bytes, as many a slice as can be made in its time.

    Args:
        pieces: each made in much less time than a slice has.
    """
    is_over = False
    while not is_over:
        made: list[bytes] = []
        num_bytes = 0
        async with Slices():
            end = time.monotonic() + SLICE_S
            while num_bytes < SLICE_BYTES and time.monotonic() < end:
                piece = next(pieces, None)
                if piece is None:
                    is_over = True
                    break
                made.append(piece)
                num_bytes += len(piece)
        if made:
            yield b"".join(made)
