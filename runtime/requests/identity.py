"""The random ids and the time in an HTTP answer.

They stay the same when another server repeats the answer because the first server died.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from contextvars import ContextVar


class Identity:
    """The source of the random ids in the answer to one HTTP request.

    All ids are derived from a key. A second server that has the key makes the same ids.

    Attributes:
        created: time when the request came, in seconds since the epoch.
    """

    def __init__(self, key: bytes, created: int) -> None:
        """Prepare to derive bytes from `key`, 16 random bytes."""
        self.created = created
        self._key = key
        self._counter = itertools.count()

    def random_bytes(self) -> bytes:
        """Return the next 32 bytes of the sequence that the key determines."""
        number = next(self._counter).to_bytes(8)
        return hashlib.blake2b(number, key=self._key, digest_size=32).digest()


# Set for a request whose answer another server may have to repeat; otherwise ids are made of the
# operating system's random bytes.
IDENTITY: ContextVar[Identity | None] = ContextVar("identity", default=None)


def created_now() -> int:
    """Return the time that an answer gives for its creation, seconds since the epoch."""
    identity = IDENTITY.get()
    return int(time.time()) if identity is None else identity.created
