"""Checks one JSON value in text that arrives in pieces, up to the value's end or first error."""

from __future__ import annotations

import json
import math
import re
from enum import Enum, auto

# The deepest nesting of JSON that is sent to clients; some clients allow only little more.
MAX_DEPTH = 128

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_DIGITS = re.compile(r"[0-9]*")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
# For each state inside a number, the next state by character; `d` is any digit but 0.
_NUMBER = {
    "sign": {"0": "zero", "d": "int"},
    "zero": {".": "point", "e": "e"},
    "int": {"d": "int", "0": "int", ".": "point", "e": "e"},
    "point": {"d": "fraction", "0": "fraction"},
    "fraction": {"d": "fraction", "0": "fraction", "e": "e"},
    "e": {"d": "exponent", "0": "exponent", "+": "e_sign", "-": "e_sign"},
    "e_sign": {"d": "exponent", "0": "exponent"},
    "exponent": {"d": "exponent", "0": "exponent"},
}
_NUMBER_ENDS = frozenset({"zero", "int", "fraction", "exponent"})


class _Place(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    AFTER = auto()
    STRING = auto()
    ESCAPE = auto()
    NUMBER = auto()
    LITERAL = auto()


class JsonValue:
    """Reads one JSON value, piece by piece.

    Attributes:
        is_done: whether the value is complete.
        is_broken: whether the text is not JSON, or nests deeper than allowed.
        open: the closing brackets that are still missing, the innermost last.
    """

    def __init__(self, max_depth: float = math.inf) -> None:
        """Expect a value with at most `max_depth` nested brackets, perhaps after whitespace."""
        self.is_done = False
        self.is_broken = False
        self._max_depth = max_depth
        self._place = _Place.VALUE
        self.open: list[str] = []
        self._is_key = False
        self._number = ""
        # The characters that are still missing: the rest of a literal, or one character for each
        # missing hex digit of an escape.
        self._rest = ""

    @property
    def is_string(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._place in (_Place.STRING, _Place.ESCAPE)

    def ending_with(self, rest: str) -> str:
        """Return the text that completes a broken value: it contains `rest` as a JSON string.

        Args:
            rest: the text from the character that broke the value. Brackets at its end that would
                close the value are not part of the string.
        """
        text = json.dumps(_without(rest, self.open), ensure_ascii=False)
        more = f", {text}"
        match self._place:
            case _Place.VALUE | _Place.FIRST_VALUE | _Place.KEY | _Place.FIRST_KEY:
                more = text
            case _Place.COLON:
                more = f": {text}"
            case _Place.STRING:
                more = text[1:]
            case _Place.ESCAPE:
                # The missing hex digits of an escape, or a second backslash.
                more = f"{'0' * len(self._rest) or chr(92)}{text[1:]}"
            case _Place.NUMBER:
                more = f"0{more}"
            case _Place.LITERAL:
                more = f"{self._rest}{more}"
        if self.open and self.open[-1] == "}" and self._is_at_key():
            more += ": null"
        return more + "".join(reversed(self.open))

    def _is_at_key(self) -> bool:
        match self._place:
            case _Place.STRING | _Place.ESCAPE:
                return self._is_key
            case _Place.VALUE | _Place.COLON:
                return False
        return True

    def feed(self, text: str, begin: int = 0) -> int:
        """Read `text` from `begin` on.

        Returns:
            The position where reading ended: the end of `text`, the end of the value, or the
            character that broke the value.
        """
        place, end = begin, len(text)
        while place < end and not (self.is_done or self.is_broken):
            place = self._read(text, place)
        return place

    def _read(self, text: str, place: int) -> int:
        match self._place:
            case _Place.STRING:
                return self._string(text, place)
            case _Place.ESCAPE:
                return self._escape(text, place)
            case _Place.NUMBER:
                return self._digits(text, place)
            case _Place.LITERAL:
                return self._literal(text, place)
        space = _SPACE.match(text, place)
        assert space is not None
        place = space.end()
        return place if place == len(text) else self._token(text[place], place)

    def _token(self, char: str, place: int) -> int:
        match self._place:
            case _Place.VALUE | _Place.FIRST_VALUE:
                if char == "]" and self._place is _Place.FIRST_VALUE:
                    return self._close(place)
                return self._value(char, place)
            case _Place.KEY | _Place.FIRST_KEY if char == '"':
                self._place, self._is_key = _Place.STRING, True
                return place + 1
            case _Place.FIRST_KEY if char == "}":
                return self._close(place)
            case _Place.COLON if char == ":":
                self._place = _Place.VALUE
                return place + 1
            case _Place.AFTER if char == ",":
                self._place = _Place.KEY if self.open[-1] == "}" else _Place.VALUE
                return place + 1
            case _Place.AFTER if char == self.open[-1]:
                return self._close(place)
        return self._break(place)

    def _value(self, char: str, place: int) -> int:
        if char in "{[" and len(self.open) < self._max_depth:
            self.open.append("}" if char == "{" else "]")
            self._place = _Place.FIRST_KEY if char == "{" else _Place.FIRST_VALUE
        elif char == '"':
            self._place = _Place.STRING
        elif char in _LITERALS:
            self._place, self._rest = _Place.LITERAL, _LITERALS[char]
        elif char == "-":
            self._place, self._number = _Place.NUMBER, "sign"
        elif "0" <= char <= "9":
            self._place, self._number = _Place.NUMBER, "zero" if char == "0" else "int"
        else:
            return self._break(place)
        return place + 1

    def _string(self, text: str, place: int) -> int:
        plain = _PLAIN.match(text, place)
        assert plain is not None
        place = plain.end()
        if place == len(text):
            return place
        if text[place] == "\\":
            self._place, self._rest = _Place.ESCAPE, ""
        elif text[place] != '"':
            return self._break(place)
        elif self._is_key:
            self._place, self._is_key = _Place.COLON, False
        else:
            self._end_value()
        return place + 1

    def _escape(self, text: str, place: int) -> int:
        char = text[place]
        if self._rest:
            if char not in _HEX:
                return self._break(place)
            self._rest = self._rest[1:]
        elif char == "u":
            self._rest = "0000"
        elif char not in _ESCAPED:
            return self._break(place)
        if not self._rest:
            self._place = _Place.STRING
        return place + 1

    def _digits(self, text: str, place: int) -> int:
        char = text[place]
        kind = "d" if "1" <= char <= "9" else "e" if char == "E" else char
        following = _NUMBER[self._number].get(kind)
        if following is None:
            if self._number not in _NUMBER_ENDS:
                return self._break(place)
            # The number ended before this character, which is not read here.
            self._end_value()
            return place
        self._number = following
        if following in ("int", "fraction", "exponent"):
            digits = _DIGITS.match(text, place)
            assert digits is not None
            return digits.end()
        return place + 1

    def _literal(self, text: str, place: int) -> int:
        if text[place] != self._rest[0]:
            return self._break(place)
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return place + 1

    def _close(self, place: int) -> int:
        self.open.pop()
        self._end_value()
        return place + 1

    def _end_value(self) -> None:
        self._place = _Place.AFTER
        self.is_done = not self.open

    def _break(self, place: int) -> int:
        self.is_broken = True
        return place


def _without(rest: str, closers: list[str]) -> str:
    """Return `rest` without the brackets at its end, if they are exactly `closers`."""
    kept = rest.rstrip()
    for closer in closers:
        if not kept.endswith(closer):
            return rest
        kept = kept[:-1].rstrip()
    return kept
