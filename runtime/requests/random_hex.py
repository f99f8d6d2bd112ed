"""Random names that cannot be guessed, drawn from the kernel many at a time.

Each call of the kernel releases the GIL. Getting it back takes milliseconds if threads compute in
Python, and the event loop needs several names for each request.
"""

from __future__ import annotations

import os
from collections import deque

MAX_BYTES = 32
_NUM_DRAWN = 128

# Each number is used once, because `popleft` is atomic.
_drawn: deque[bytes] = deque()


def random_bytes(num_bytes: int) -> bytes:
    """Return up to `MAX_BYTES` bytes of the kernel's randomness."""
    assert num_bytes <= MAX_BYTES, num_bytes
    while True:
        try:
            return _drawn.popleft()[:num_bytes]
        except IndexError:
            drawn = os.urandom(_NUM_DRAWN * MAX_BYTES)
            _drawn.extend(drawn[at : at + MAX_BYTES] for at in range(0, len(drawn), MAX_BYTES))


def random_hex(num_bytes: int) -> str:
    """Return `random_bytes` as lowercase hexadecimal digits, two for each byte."""
    return random_bytes(num_bytes).hex()
