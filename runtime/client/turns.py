"""Long work that has to stay on the event loop is cut into slices, one of them a turn of the loop.

However many requests have such work, the loop is held for one slice between two looks at its
sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

# How long a slice goes on before it ends, seconds: a tenth of what a probe may wait.
SLICE_S = 0.002
# Bytes after which a slice ends all the same: about what a socket takes at once.
SLICE_BYTES = 256 * 1024

_locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


@contextlib.asynccontextmanager
async def loop_turn() -> AsyncGenerator[float, None]:
    """Wait for the turn of this slice; gives the time (`time.monotonic`) at which it has to end."""
    loop = asyncio.get_running_loop()
    lock = _locks.get(loop)
    if lock is None:
        lock = _locks[loop] = asyncio.Lock()
    await lock.acquire()
    try:
        yield time.monotonic() + SLICE_S
    finally:
        # Not now: whoever waits goes on after the loop has looked at its sockets.
        loop.call_soon(lock.release)


async def each_in_turns(items: Iterable[T], work: Callable[[T], object]) -> None:
    """Call `work` with each of `items`, as often a slice as its time allows."""
    waiting = deque(items)
    while waiting:
        async with loop_turn() as end:
            while waiting and time.monotonic() < end:
                work(waiting.popleft())


async def in_turns(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The same bytes, as many a slice as can be made in its time.

    Args:
        pieces: each made in much less time than a slice has.
    """
    is_over = False
    while not is_over:
        made: list[bytes] = []
        num_bytes = 0
        async with loop_turn() as end:
            while num_bytes < SLICE_BYTES and time.monotonic() < end:
                piece = next(pieces, None)
                if piece is None:
                    is_over = True
                    break
                made.append(piece)
                num_bytes += len(piece)
        if made:
            yield b"".join(made)
