"""The JSON of a safetensors header, entry by entry. Front-safe: no torch.

The whole of it at once would hold the interpreter, and with it the front's event loop, for seconds
where the header is as large as the format allows.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

# More than any entry of use; each is decoded in one piece.
MAX_ENTRY_CHARS = 2**19
_PIECE_BYTES = 2**20
_SPACES = re.compile(r"[ \t\r\n]*")
_decoder = json.JSONDecoder()


class Reader(Protocol):
    """An open file."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes."""


def entries(file: Reader, num_bytes: int) -> Iterator[tuple[str, Any]]:
    """Names and values of the object that the next `num_bytes` of `file` hold, in its order.

    Raises:
        ValueError: it is no JSON object, or an entry is longer than `MAX_ENTRY_CHARS`.
        RecursionError: a value is nested too deeply.
    """
    text = _Text(file, num_bytes)
    text.take("{")
    if text.next() == "}":
        text.take("}")
    else:
        while True:
            name = text.value()
            if not isinstance(name, str):
                raise ValueError("a name is not a string")
            text.take(":")
            yield name, text.value()
            if text.next() == "}":
                text.take("}")
                break
            text.take(",")
    if text.next():
        raise ValueError("more than one object")


class _Text:
    """A window that moves over the text; the entry that comes next is in it, unless too long."""

    def __init__(self, file: Reader, num_bytes: int) -> None:
        self._file = file
        self._rest = num_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._window = ""
        self._at = 0

    def _fill(self) -> None:
        if not self._rest or len(self._window) - self._at >= 2 * MAX_ENTRY_CHARS:
            return
        data = self._file.read(min(_PIECE_BYTES, self._rest))
        self._rest = self._rest - len(data) if data else 0
        self._window = self._window[self._at :] + self._utf8.decode(data, not self._rest)
        self._at = 0

    def next(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            self._fill()
            found = _SPACES.match(self._window, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._window) or not self._rest:
                return self._window[self._at : self._at + 1]

    def take(self, wanted: str) -> None:
        """Go behind `wanted`, which comes next."""
        found = self.next()
        if found != wanted:
            raise ValueError(f"{found!r} in place of {wanted!r}")
        self._at += 1

    def value(self) -> Any:
        """The value that comes next."""
        self.next()
        # Of a value that is too long the window has no end, so this is never much work.
        value, end = _decoder.raw_decode(self._window, self._at)
        if end - self._at > MAX_ENTRY_CHARS:
            raise ValueError(f"an entry of more than {MAX_ENTRY_CHARS} characters")
        self._at = end
        return value
