"""Reads the JSON of a tool call: an object with a name and arguments, or only the arguments."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum, auto

import msgspec

from openai_api.json_scan import JsonValue
from openai_api.loose_scan import LooseRest
from openai_api.tool_parsers.call_writer import CallWriter

NAME_KEYS = frozenset({"name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "type"})

_SPACE = re.compile(r"[ \t\n\r]*")


class _Place(Enum):
    OPEN = auto()
    FIRST_KEY = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    BEFORE_VALUE = auto()
    IN_VALUE = auto()
    AFTER = auto()


class _Arguments:
    """Reads the arguments of a call that has begun, and passes them on as they come.

    The arguments are passed on even if they are not JSON.

    Attributes:
        is_done: whether the arguments, and with them the call, are over.
        is_at_end: whether the arguments ended right before one of `ends`, the texts that may follow
            a call in the family's format.
        is_held: whether the unread text may be the beginning of one of `ends`.
    """

    def __init__(self, writer: CallWriter, ends: Sequence[str]) -> None:
        self.is_done = self.is_at_end = self.is_held = False
        self._writer = writer
        self._ends = ends
        self._value = JsonValue()
        self._rest: LooseRest | None = None

    def feed(self, text: str, begin: int) -> int:
        """Read `text` from `begin` on. The first call must begin at the opening brace.

        Returns:
            The position where reading ended.
        """
        end = begin
        if self._rest is None:
            end = self._value.feed(text, begin)
            if self._value.is_broken:
                # Broken arguments are passed on to their end. Cutting them off here would not make
                # them JSON.
                self._rest = LooseRest(self._value, self._ends)
        if self._rest is not None:
            end = self._rest.feed(text, end)
            self.is_at_end, self.is_held = self._rest.is_at_end, self._rest.is_held
        self._writer.arguments(text[begin:end])
        self.is_done = self._value.is_done or (self._rest is not None and self._rest.is_done)
        if self.is_done:
            self._writer.end(is_complete=self._rest is None)
        return end


class CallObject:
    """Reads a call's object such as `{"name": "f", "arguments": {...}}`.

    If the name comes first, as models usually write it, the call begins at its arguments, which are
    passed on as they come. Otherwise the call is passed on when the object is complete.

    Attributes:
        is_done: whether the object is complete.
        is_broken: whether the text has turned out not to be a call.
        is_held: whether the unread text may be the beginning of one of `ends`.
        read: the text read so far; empty once a call has begun.
    """

    def __init__(self, writer: CallWriter, ends: Sequence[str] = ()) -> None:
        """Prepare to write a call to `writer`; `ends` are the texts that may follow a call."""
        self.is_done = self.is_broken = self.is_held = False
        self.read: list[str] = []
        self._writer = writer
        self._ends = ends
        self._told: _Arguments | None = None
        self._has_begun = False
        self._place = _Place.OPEN
        self._value = JsonValue()
        self._key = ""
        self._name: str | None = None
        # The text of the current key or value, and arguments that were read before the name.
        self._text: list[str] = []
        self._arguments: str | None = None

    def feed(self, text: str, begin: int) -> int:
        """Read `text` from index `begin` on; return the index where reading ended."""
        place, end = begin, len(text)
        self.is_held = False
        while place < end and not (self.is_done or self.is_broken or self.is_held):
            before = place
            place = self._read(text, place)
            if self._has_begun:
                self.read = []
            else:
                self.read.append(text[before:place])
        return place

    def finish(self) -> None:
        """End the output; a call that is open ends as incomplete."""
        if self._writer.is_open:
            self._writer.end(is_complete=False)

    def _read(self, text: str, place: int) -> int:
        if self._place in (_Place.IN_KEY, _Place.IN_VALUE):
            return self._read_value(text, place)
        space = _SPACE.match(text, place)
        assert space is not None
        place = space.end()
        return place if place == len(text) else self._token(text[place], place)

    def _token(self, char: str, place: int) -> int:
        match self._place:
            case _Place.OPEN if char == "{":
                self._place = _Place.FIRST_KEY
                return place + 1
            case _Place.KEY | _Place.FIRST_KEY if char == '"':
                self._begin_value(_Place.IN_KEY)
                return place
            case _Place.COLON if char == ":":
                self._place = _Place.BEFORE_VALUE
                return place + 1
            case _Place.BEFORE_VALUE:
                self._begin_value(_Place.IN_VALUE)
                is_call = self._key in ARGUMENT_KEYS and char == "{" and self._name is not None
                if is_call and not self._has_begun:
                    assert self._name is not None
                    # `begin` succeeds, because reading stops at a name that is not offered.
                    self._has_begun = self._writer.begin(self._name)
                    self._told = _Arguments(self._writer, self._ends)
                return place
            case _Place.AFTER if char == ",":
                self._place = _Place.KEY
                return place + 1
            case _Place.AFTER if char == "}":
                self._close()
                return place + 1
        if self._has_begun:
            # The call's arguments are complete, so an error after them ends the object.
            self.is_done = True
        else:
            self.is_broken = True
        return place

    def _begin_value(self, place: _Place) -> None:
        self._place, self._value, self._text = place, JsonValue(), []

    def _read_value(self, text: str, begin: int) -> int:
        if self._told is not None:
            return self._read_told(self._told, text, begin)
        end = self._value.feed(text, begin)
        self._text.append(text[begin:end])
        if self._value.is_broken:
            self.is_broken = True
        elif self._value.is_done:
            self._end_value()
        return end

    def _read_told(self, told: _Arguments, text: str, begin: int) -> int:
        end = told.feed(text, begin)
        self.is_held, self.is_done = told.is_held, told.is_at_end
        if told.is_done:
            self._told, self._place = None, _Place.AFTER
        return end

    def _end_value(self) -> None:
        value = "".join(self._text)
        if self._place is _Place.IN_KEY:
            self._key, self._place = _string(value) or "", _Place.COLON
            known = NAME_KEYS | ARGUMENT_KEYS | _OTHER_KEYS
            self.is_broken = not self._has_begun and self._key not in known
            return
        self._place = _Place.AFTER
        if self._has_begun:
            return
        if self._key in NAME_KEYS:
            self._name = _string(value)
            self.is_broken = not self._writer.offers(self._name)
        elif self._key in ARGUMENT_KEYS:
            self._arguments = value if value.startswith("{") else _string(value)

    def _close(self) -> None:
        if self._has_begun:
            self.is_done = True
            return
        arguments = "{}" if self._arguments is None else self._arguments
        if self._name is None or not is_object(arguments):
            self.is_broken = True
            return
        self._has_begun = self.is_done = self._writer.call(self._name, arguments)


class CallArgumentsObject:
    """Reads the arguments of a call whose name came before them; else like `CallObject`."""

    def __init__(self, writer: CallWriter, ends: Sequence[str] = ()) -> None:
        """Prepare to write the open call's arguments to `writer`; `ends` may follow the call."""
        self.is_done = self.is_broken = self.is_held = False
        self.read: list[str] = []
        self._writer = writer
        self._told = _Arguments(writer, ends)

    def feed(self, text: str, begin: int) -> int:
        """Read `text` from index `begin` on; return the index where reading ended."""
        end = self._told.feed(text, begin)
        self.is_done, self.is_held = self._told.is_done, self._told.is_held
        return end

    def finish(self) -> None:
        """End the output; a call that is open ends as incomplete."""
        if self._writer.is_open:
            self._writer.end(is_complete=False)


def is_object(text: str) -> bool:
    """Whether the whole `text` is one JSON object."""
    value = JsonValue()
    end = value.feed(text)
    return text.startswith("{") and value.is_done and not text[end:].strip()


def _string(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None
