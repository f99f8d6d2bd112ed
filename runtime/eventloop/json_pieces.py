"""Encodes JSON that may be large: small JSON at once, large JSON in pieces while it is sent.

Encoding a million log-probabilities at once would block the event loop for a second. As Python
objects they would take a hundred times the memory of their numbers. So such a list stays packed
until it is sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import orjson

# Numbers, or equal work, that are encoded at once, in about fifty microseconds.
INLINE_COST = 256
_BYTES_PER_COST = 2048
# Numbers of a list that are encoded together.
BATCH = 512
# Stands for a list while the JSON around it is encoded. JSON never contains this byte.
_HOLE = b"\x00"


class Pieces(ABC):
    """A value that is encoded to JSON in pieces, while it is sent.

    Attributes:
        cost: how many numbers, or equal work, are still to be encoded.
    """

    cost: int

    @abstractmethod
    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON in pieces; each piece takes well under a millisecond."""


class JsonList(Pieces):
    """A list whose items are made while it is encoded, so it can be encoded only once."""

    def __init__(self, cost: int, items: Iterable[Any], *, batch: int = 1) -> None:
        """Prepare to encode `items`, `batch` at a time, which should have about `BATCH` numbers."""
        self.cost = cost
        self._items = iter(items)
        self._batch = batch

    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON in pieces of `batch` items."""
        comma = b"["
        while batch := list(islice(self._items, self._batch)):
            yield comma + orjson.dumps(batch)[1:-1]
            comma = b","
        yield b"[]" if comma == b"[" else b"]"


class JsonItems(Pieces):
    """A list of values, each of which may be large or have large lists in it."""

    def __init__(self, items: Iterable[Any], cost: int) -> None:
        """Prepare to encode the items one after the other."""
        self._items = items
        self.cost = cost

    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON in pieces; large items have several pieces."""
        comma = b""
        yield b"["
        for item in self._items:
            yield comma
            yield from all_pieces(item)
            comma = b","
        yield b"]"


def list_of(items: Iterable[Any], cost: int) -> list[Any] | JsonItems:
    """Return `items` as a list, or, if `cost` is large, as a list that is encoded in pieces."""
    return list(items) if cost <= INLINE_COST else JsonItems(items, cost)


class GrowingJson(Pieces):
    """A list that is encoded again and again while it grows; each item is encoded only once."""

    def __init__(self, *, keeps: bool) -> None:
        """Begin empty. With `keeps`, each encoding has all items so far, else only new ones."""
        self.cost = 0
        self._keeps = keeps
        self._encoded: list[bytes] = []
        self._waiting: deque[tuple[Iterator[Any], int]] = deque()

    def extend(self, cost: int, items: Iterable[Any], *, batch: int = 1) -> None:
        """Add `items`, which have `cost` numbers; `batch` of them are encoded together."""
        self.cost += cost
        self._waiting.append((iter(items), batch))

    def pieces(self) -> Iterator[bytes]:
        """Yield the JSON in pieces: the items encoded before in one piece, then the new ones."""
        comma = b"["
        if self._encoded:
            # The items that are encoded already are joined to one piece.
            self._encoded = [b",".join(self._encoded)]
            yield b"[" + self._encoded[0]
            comma = b","
        while self._waiting:
            items, size = self._waiting.popleft()
            while batch := list(islice(items, size)):
                data = orjson.dumps(batch)[1:-1]
                yield comma + data
                comma = b","
                if self._keeps:
                    self._encoded.append(data)
        # Sending the kept text again costs time too, though less.
        self.cost = sum(map(len, self._encoded)) // _BYTES_PER_COST
        yield b"[]" if comma == b"[" else b"]"


def encode(content: Any) -> bytes | Iterator[bytes]:
    """Return `content` as JSON bytes, or as an iterator of pieces if it has large `Pieces`."""
    try:
        return orjson.dumps(content)
    except TypeError:
        # The usual case, without `Pieces`, is tried first: searching for them would take longer.
        pass
    large: list[Pieces] = []
    data = orjson.dumps(content, _hole(large))
    pieces = _filled(data, large)
    return pieces if sum(each.cost for each in large) > INLINE_COST else b"".join(pieces)


def all_pieces(content: Any) -> Iterator[bytes]:
    """Yield `content` as JSON in pieces, even if it is small."""
    large: list[Pieces] = []
    yield from _filled(orjson.dumps(content, _hole(large)), large)


def _hole(large: list[Pieces]) -> Callable[[Any], orjson.Fragment]:
    def leave_out(value: Any) -> orjson.Fragment:
        if not isinstance(value, Pieces):
            raise TypeError(f"{type(value).__name__} has no JSON")
        large.append(value)
        return orjson.Fragment(_HOLE)

    return leave_out


def _filled(data: bytes, large: list[Pieces]) -> Iterator[bytes]:
    first, *others = data.split(_HOLE)
    yield first
    for value, after in zip(large, others, strict=True):
        yield from value.pieces()
        yield after
