"""A cache of compiled grammars with a limit in bytes, which evicts the least recently used ones."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")

_SIZE_BYTES = 8
# Memory of a loaded grammar that its library does not report, bytes.
_OVERHEAD_BYTES = 64 * 1024


def with_size(content: bytes, loaded_bytes: int) -> bytes:
    """Return a compiled grammar as a message: its memory when loaded, then `content`.

    `loaded_bytes` is this memory according to the library.
    """
    return (loaded_bytes + _OVERHEAD_BYTES).to_bytes(_SIZE_BYTES, "little") + content


def loaded_size(payload: bytes) -> int:
    """Return the approximate memory of a compiled grammar when it is loaded, in bytes.

    `payload` is a message from `with_size`.
    """
    return int.from_bytes(payload[:_SIZE_BYTES], "little")


def content_of(payload: bytes) -> bytes:
    """Return the compiled grammar in a message from `with_size`."""
    return payload[_SIZE_BYTES:]


class ByteCache(Generic[V]):
    """A cache of values by key, with a limit in bytes.

    It is deterministic: two caches that get the same calls have the same keys. The front process
    makes the same calls as the scheduler, so it knows which grammars the scheduler has. It sends a
    compiled grammar only if the scheduler does not have it.

    Attributes:
        size_bytes: total size of all values.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Keep at most `limit_bytes`; the newest value is always kept, whatever its size."""
        self._limit = limit_bytes
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> V | None:
        """Return the value of a key, which then counts as just used; `None` if it is missing."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, value: V, size_bytes: int) -> None:
        """Store a value, and evict the least recently used ones until the limit is met."""
        old = self._entries.pop(key, None)
        if old is not None:
            self.size_bytes -= old[1]
        self._entries[key] = (value, size_bytes)
        self.size_bytes += size_bytes
        while self.size_bytes > self._limit and len(self._entries) > 1:
            _, (_, freed) = self._entries.popitem(last=False)
            self.size_bytes -= freed

    def clear(self) -> None:
        """Remove all values."""
        self._entries.clear()
        self.size_bytes = 0
