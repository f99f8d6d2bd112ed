"""Divides long work on the event loop into slices, one for each iteration of the loop.

However many requests have such work, the loop runs at most one slice before it polls its sockets
again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Self
from weakref import WeakKeyDictionary

# Seconds until a slice ends: a tenth of the time that a health probe may wait.
SLICE_S = 0.002
# Bytes after which a slice ends earlier; a socket accepts about as many at once.
SLICE_BYTES = 256 * 1024

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


class Slices:
    """A context manager for long work, which awaits `step` between small parts.

    Only one slice of all such work runs at a time. Short work is not divided.
    """

    def __init__(self, *, is_long: bool = True) -> None:
        """Prepare; the first slice begins when the block is entered."""
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
        """If the slice's time is over, end it and wait until the next one may begin."""
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
            # The release is scheduled, so that the loop polls its sockets before the next waiting
            # task goes on.
            asyncio.get_running_loop().call_soon(self._lock.release)
            self._lock = None


async def in_turns(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Join `pieces` and yield one result for each time slice, so that other tasks run between.

    Args:
        pieces: an iterator; making one piece must take much less time than a slice.
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
