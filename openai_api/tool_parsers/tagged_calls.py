"""Reads calls whose arguments are texts between tags; a family's parser is a table of its tags."""

from __future__ import annotations

import re
from typing import ClassVar

import orjson

from openai_api.call_ids import IdForm
from openai_api.tool_parsers.call_writer import CallWriter
from openai_api.tool_parsers.tool_parser import CallForm, Functions, ToolPart
from openai_api.tool_parsers.typed_values import json_of, types_of
from runtime.text.tag_scan import UntilTag

# The most characters between the tag that begins a call and the end of the call's name.
MAX_HEADER = 512
_TEXT = frozenset({"string"})
_SPACE = re.compile(r"\s*")


class TaggedCalls:
    """Reads `open name (key value)* close`; passes each complete argument on as JSON.

    An argument that must be a string by its schema is passed on while it is written.

    Attributes:
        opens: tags, each of which begins a call or a series of calls.
        header: pattern of the text between such a tag and `name_end`, with a group `name`.
        name_end: text that ends the name.
        keeps_name_end: whether `name_end` is the beginning of the next tag.
        key_open, key_end: tags around an argument's name.
        value_open: tag before the argument's value; empty if `key_end` is that tag.
        value_end: tag after the value.
        close: tag that ends the call.
        tails: texts that may follow a call, and belong to it.
        separators: texts between a call and the next one in the same series.
    """

    markers: tuple[str, ...] = ()
    call_form: CallForm | None = None
    id_form: IdForm | None = None
    opens: ClassVar[tuple[str, ...]]
    header: ClassVar[re.Pattern[str]]
    name_end: ClassVar[str]
    keeps_name_end: ClassVar[bool] = False
    key_open: ClassVar[str]
    key_end: ClassVar[str]
    value_open: ClassVar[str] = ""
    value_end: ClassVar[str]
    close: ClassVar[str]
    tails: ClassVar[tuple[str, ...]] = ()
    separators: ClassVar[tuple[str, ...]] = ()

    def __init__(self, functions: Functions, *, max_calls: int | None) -> None:
        """Accept at most `max_calls` calls, of the given functions only."""
        self._writer = CallWriter(functions, max_calls)
        self._outside = UntilTag(*self.opens)
        self._inside: UntilTag | None = None
        self._behind = sorted((*self.opens, *self.tails, *self.separators), key=len, reverse=True)
        self._lead: list[str] = []
        self._header: list[str] = []
        self._held = ""
        self._name = self._key = ""
        self._types: frozenset[str] = frozenset()
        self._known_types: dict[tuple[str, str], frozenset[str]] = {}
        self._num_arguments = 0
        self._is_first_line = False
        self._value: list[str] = []
        self._state = self._in_text

    def feed(self, text: str) -> list[ToolPart]:
        """Add more output; return texts and parts of calls, in order."""
        if self._held:
            text, self._held = self._held + text, ""
        place = 0
        while place < len(text):
            place = self._state(text, place)
        return self._writer.take()

    def finish(self) -> list[ToolPart]:
        """End the output; return the text that was held back, and the end of an open call."""
        rest = "".join([*self._lead, *self._header, self._held, self._outside.finish()])
        if self._writer.is_open:
            self._writer.end(is_complete=False)
        elif not (self._writer.has_called and rest.isspace()):
            self._writer.text(rest)
        self._lead, self._header, self._held = [], [], ""
        return self._writer.take()

    # ---- states: each one reads from index `place`, and returns where it ended ----

    def _in_text(self, text: str, place: int) -> int:
        passed, end = self._outside.feed(text, place)
        self._writer.text(passed)
        if end is None:
            return len(text)
        self._lead = [self._outside.space, self._outside.found]
        self._state = self._in_header
        return end

    def _in_header(self, text: str, place: int) -> int:
        most = place + MAX_HEADER - sum(map(len, self._header))
        found = text.find(self.name_end, place, most)
        end = min(len(text), most) if found < 0 else found
        self._header.append(text[place:end])
        if found < 0:
            if end == most:
                self._give_back()
            return end
        header = self.header.fullmatch("".join(self._header))
        if header is None or not self._writer.begin(header["name"]):
            self._give_back()
            return end
        self._lead, self._header = [], []
        self._name, self._num_arguments = header["name"], 0
        self._state = self._in_call
        return end + (0 if self.keeps_name_end else len(self.name_end))

    def _in_call(self, text: str, place: int) -> int:
        """Read the text after an argument, up to the next argument or the call's end."""
        place, tag = self._tag(text, place, (self.key_open, self.close))
        if tag == self.close:
            self._close_call()
            self._state = self._behind_call
        elif tag:
            self._inside = UntilTag(self.key_end, keep_space=True)
            self._value, self._state = [], self._in_key
        elif place < len(text):
            # Other text ends the call, with the arguments that were written so far.
            self._close_call()
            self._state = self._in_text
        return place

    def _in_key(self, text: str, place: int) -> int:
        passed, end = self._feed_inside(text, place)
        self._value.append(passed)
        if end is None:
            return len(text)
        self._key = "".join(self._value).strip()
        if self.value_open:
            self._state = self._before_value
        else:
            self._begin_value()
        return end

    def _before_value(self, text: str, place: int) -> int:
        place, tag = self._tag(text, place, (self.value_open,))
        if tag:
            self._begin_value()
        elif place < len(text):
            # Other text ends the call, with the arguments that were written so far.
            self._close_call()
            self._state = self._in_text
        return place

    def _begin_value(self) -> None:
        place = (self._name, self._key)
        if place not in self._known_types:
            # The types are found once for all calls, because a schema may list a hundred thousand
            # values.
            self._known_types[place] = types_of(self._writer.functions[self._name], self._key)
        self._types = self._known_types[place]
        opening = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        quote = '"' if self._types == _TEXT else ""
        self._writer.arguments(f"{opening}{_quoted(self._key)}: {quote}")
        self._inside = UntilTag(self.value_end, keep_space=True)
        self._value, self._is_first_line, self._state = [], True, self._in_value

    def _in_value(self, text: str, place: int) -> int:
        passed, end = self._feed_inside(text, place)
        if passed and self._is_first_line:
            # A line break at the start or the end of a value belongs to the tags.
            passed, self._is_first_line = passed.removeprefix("\n"), False
        if end is not None:
            # (Whitespace at the end was held back until the tag came.)
            passed = passed.removesuffix("\n")
        if self._types == _TEXT:
            self._writer.arguments(_quoted(passed)[1:-1])
        else:
            self._value.append(passed)
        if end is None:
            return len(text)
        is_text = self._types == _TEXT
        self._writer.arguments('"' if is_text else json_of("".join(self._value), self._types))
        self._state = self._in_call
        return end

    def _behind_call(self, text: str, place: int) -> int:
        place, tag = self._tag(text, place, self._behind)
        if not tag:
            if place < len(text):
                self._give_back()
        elif tag in self.tails:
            self._lead = []
        else:
            self._lead.append(tag)
            self._state = self._in_header
        return place

    def _feed_inside(self, text: str, place: int) -> tuple[str, int | None]:
        assert self._inside is not None
        return self._inside.feed(text, place)

    def _tag(self, text: str, place: int, tags: tuple[str, ...] | list[str]) -> tuple[int, str]:
        """Skip whitespace and one of `tags`.

        Returns:
            The position after it, and the tag. The tag is empty if another text follows, or if
            `text` ends before that is clear.
        """
        space = _SPACE.match(text, place)
        assert space is not None
        place = space.end()
        if not self._writer.is_open and space[0]:
            self._lead.append(space[0])
        for tag in tags:
            if text.startswith(tag, place):
                return place + len(tag), tag
            if place < len(text) and tag.startswith(text[place : place + len(tag)]):
                self._held = text[place:]
                return len(text), ""
        return place, ""

    def _close_call(self) -> None:
        self._writer.arguments("}" if self._num_arguments else "{}")
        self._writer.end(is_complete=True)

    def _give_back(self) -> None:
        """Pass the read text on as text, because it is not a call."""
        self._writer.text("".join([*self._lead, *self._header]))
        self._lead, self._header, self._state = [], [], self._in_text


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()
