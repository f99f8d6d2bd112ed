"""Finds the end of a value that is not valid JSON, in text that arrives in pieces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from openai_api.json_scan import JsonValue

_CLOSERS = {"{": "}", "[": "]"}


class LooseRest:
    """Reads the rest of a broken JSON value, where only quotes and brackets count.

    The value ends where its outermost bracket closes, or before one of the texts `ends`, which
    cannot be part of the value.

    Attributes:
        is_done: whether the end was found.
        is_at_end: whether the value ended before one of `ends`, which is left unread.
        is_held: whether the unread text may be the beginning of one of `ends`.
    """

    def __init__(self, value: JsonValue, ends: Sequence[str]) -> None:
        """Start at the character at which `value` stopped being valid JSON.

        Args:
            value: what was read so far; it began with a bracket.
            ends: texts that end the value, if they come before its closing bracket.
        """
        self.is_done = self.is_at_end = self.is_held = False
        self._open = list(value.open)
        self._num_open = {closer: self._open.count(closer) for closer in _CLOSERS.values()}
        self._is_string = value.is_string
        self._is_escaped = False
        self._ends = tuple(ends)
        self._longest = max(map(len, ends), default=0)
        firsts = re.escape("".join({end[0] for end in ends}))
        self._dull = re.compile(rf'[^"\\{{}}\[\]{firsts}]+')

    def feed(self, text: str, begin: int) -> int:
        """Read `text` from `begin` on.

        Returns:
            The position where reading ended: the end of `text`, the end of the value, or the
            beginning of a text that is or may become one of `ends`.
        """
        place, end = begin, len(text)
        self.is_held = False
        while place < end and not self.is_done:
            dull = self._dull.match(text, place)
            if dull is not None and not self._is_escaped:
                place = dull.end()
            elif self._finds_end(text, place):
                return place
            else:
                self._read(text[place])
                place += 1
        return place

    def _finds_end(self, text: str, place: int) -> bool:
        if text.startswith(self._ends, place):
            self.is_done = self.is_at_end = True
            return True
        rest = text[place : place + self._longest]
        self.is_held = any(end.startswith(rest) for end in self._ends)
        return self.is_held

    def _read(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == '"':
            self._is_string = not self._is_string
        elif self._is_string:
            self._is_escaped = char == "\\"
        elif char in _CLOSERS:
            self._open.append(_CLOSERS[char])
            self._num_open[_CLOSERS[char]] += 1
        elif self._num_open.get(char):
            # A bracket also closes the inner brackets that were left open.
            while (closed := self._open.pop()) != char:
                self._num_open[closed] -= 1
            self._num_open[char] -= 1
            self.is_done = not self._open
