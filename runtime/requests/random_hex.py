"""Makes random names that cannot be guessed, from random bytes of the operating system.

Many bytes are drawn at a time, because each system call releases the GIL. Getting the GIL back
takes milliseconds while other threads compute in Python, and the event loop needs several names for
each request.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable

from runtime.requests.identity import IDENTITY

MAX_BYTES = 32
_NUM_DRAWN = 128

# Drawn bytes. No entry is used twice, also not by two threads, because `popleft` is atomic.
_drawn: deque[bytes] = deque()


def random_bytes(num_bytes: int) -> bytes:
    """Return up to `MAX_BYTES` random bytes, from the system or from the request's `IDENTITY`."""
    assert num_bytes <= MAX_BYTES, num_bytes
    identity = IDENTITY.get()
    if identity is not None:
        return identity.random_bytes()[:num_bytes]
    while True:
        try:
            return _drawn.popleft()[:num_bytes]
        except IndexError:
            drawn = os.urandom(_NUM_DRAWN * MAX_BYTES)
            _drawn.extend(drawn[at : at + MAX_BYTES] for at in range(0, len(drawn), MAX_BYTES))


def random_hex(num_bytes: int) -> str:
    """Return `random_bytes` as lowercase hexadecimal digits, two for each byte."""
    return random_bytes(num_bytes).hex()


def seed_source(random_seed: int | None) -> Callable[[], int]:
    """Return a function that gives a seed for each request without one.

    With `random_seed` the sequence of seeds is reproducible.
    """
    if random_seed is None:
        return lambda: int.from_bytes(random_bytes(8)) >> 2
    # Spread the counter over 62 bits, by the multiplier of SplitMix64.
    counter = itertools.count(random_seed)
    return lambda: (next(counter) * 0x9E3779B97F4A7C15) & (2**62 - 1)
