"""A cache bounded by bytes that evicts the least recently used values."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")

_SIZE_BYTES = 8
# Memory of a grammar that its library does not count, bytes.
_OVERHEAD_BYTES = 64 * 1024


def with_size(content: bytes, loaded_bytes: int) -> bytes:
    """Return a compiled grammar's message: the grammar's memory once loaded, then `content`."""
    return (loaded_bytes + _OVERHEAD_BYTES).to_bytes(_SIZE_BYTES, "little") + content


def loaded_size(payload: bytes) -> int:
    """Return the approximate memory of a compiled grammar once it is loaded, bytes."""
    return int.from_bytes(payload[:_SIZE_BYTES], "little")


def content_of(payload: bytes) -> bytes:
    """Return the grammar without its size."""
    return payload[_SIZE_BYTES:]


class ByteCache(Generic[V]):
    """Values by key. Two caches with the same calls have the same keys.

    The front keeps a copy of the scheduler's keys. It sends a compiled grammar only if the copy
    shows that the scheduler does not have it.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Keep at most `limit_bytes`, and always the newest value, whatever its size."""
        self._limit = limit_bytes
        self._entries: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> V | None:
        """Return the value of a key, and mark it as just used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, value: V, size_bytes: int) -> None:
        """Store `value`, and evict the least recently used ones until everything fits."""
        old = self._entries.pop(key, None)
        if old is not None:
            self.size_bytes -= old[1]
        self._entries[key] = (value, size_bytes)
        self.size_bytes += size_bytes
        while self.size_bytes > self._limit and len(self._entries) > 1:
            _, (_, freed) = self._entries.popitem(last=False)
            self.size_bytes -= freed

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()
        self.size_bytes = 0
