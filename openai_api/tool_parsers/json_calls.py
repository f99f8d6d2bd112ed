"""Reads calls whose arguments are JSON. The parsers of most families are tables for this class."""

from __future__ import annotations

import re
from typing import ClassVar

from openai_api.call_ids import IdForm
from openai_api.tool_parsers.call_object import CallArgumentsObject, CallObject
from openai_api.tool_parsers.call_writer import CallWriter
from openai_api.tool_parsers.tool_parser import CallForm, Functions, ToolPart
from runtime.text.tag_scan import UntilTag

# The most characters between a call's tag and its arguments: further tags, a name, perhaps an id.
MAX_HEADER = 512

_SPACE = re.compile(r"\s*")


class JsonCalls:
    """Reads `open [header] {...} [tail]`.

    Without a header, the object is a call with name and arguments. After a header, which has the
    name, the object is only the arguments.

    Attributes:
        opens: tags, each of which begins a call or a series of calls.
        header: pattern of the text between such a tag and the brace, with groups `name` and perhaps
            `id`; `None` if the name is always in the object.
        header_end: text that ends every header, so that other text is recognised early. If empty,
            only the brace ends a header.
        tails: texts that may follow a call, and belong to it.
        separators: texts between two calls where the second one has no tag.
        bare: characters that may begin an output with calls, in place of a tag.
        has_array: whether several objects may be in brackets.
    """

    markers: tuple[str, ...] = ()
    call_form: CallForm | None = None
    id_form: IdForm | None = None
    opens: ClassVar[tuple[str, ...]] = ()
    header: ClassVar[re.Pattern[str] | None] = None
    header_end: ClassVar[str] = ""
    tails: ClassVar[tuple[str, ...]] = ()
    separators: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[str] = ""
    has_array: ClassVar[bool] = False

    def __init__(self, functions: Functions, *, max_calls: int | None) -> None:
        """Accept at most `max_calls` calls, of the given functions only."""
        self._writer = CallWriter(functions, max_calls)
        self._outside = UntilTag(*self.opens) if self.opens else None
        self._behind = sorted((*self.opens, *self.tails, *self.separators), key=len, reverse=True)
        # Texts that follow calls and never occur in arguments. They end arguments that are not
        # JSON, whose end the brackets do not show.
        self._ends = [tag for tag in (*self.opens, *self.tails) if tag in self.markers]
        self._object: CallObject | CallArgumentsObject | None = None
        self._in_array = False
        # Text that was read and may belong to a call: whitespace and tags in `_lead`, then what may
        # be a header.
        self._lead: list[str] = []
        self._header: list[str] = []
        # The end of the last piece, if a text that follows calls may begin there.
        self._held = ""
        self._state = self._at_start if self.bare else self._in_text

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
        if self._object is not None:
            if self._writer.is_open:
                self._writer.arguments(self._held)
                self._held = ""
            self._object.finish()
            self._header = self._object.read
        rest = "".join([*self._lead, *self._header, self._held])
        if self._outside is not None:
            rest += self._outside.finish()
        if not (self._writer.has_called and rest.isspace()):
            self._writer.text(rest)
        self._lead, self._header, self._held, self._object = [], [], "", None
        return self._writer.take()

    # ---- states: each one reads from index `place`, and returns where it ended ----

    def _at_start(self, text: str, place: int) -> int:
        place = self._skip_space(text, place)
        if place < len(text):
            if text[place] in self.bare:
                self._state = self._at_call
            else:
                self._give_back()
        return place

    def _in_text(self, text: str, place: int) -> int:
        if self._outside is None:
            self._writer.text(text[place:])
            return len(text)
        passed, end = self._outside.feed(text, place)
        self._writer.text(passed)
        if end is None:
            return len(text)
        self._lead = [self._outside.space, self._outside.found]
        self._state = self._at_call
        return end

    def _at_call(self, text: str, place: int) -> int:
        place = self._skip_space(text, place)
        if place == len(text):
            return place
        if self.has_array and text[place] == "[" and not self._in_array:
            self._in_array = True
            self._lead.append("[")
            return place + 1
        if text[place] == "{":
            self._object = CallObject(self._writer, self._ends)
            self._state = self._in_object
        elif self.header is None or self._in_array:
            self._give_back()
        else:
            self._state = self._in_header
        return place

    def _in_header(self, text: str, place: int) -> int:
        before = sum(map(len, self._header))
        piece = text[place : place + MAX_HEADER - before]
        header = "".join([*self._header, piece])
        ends = [header.find("{")]
        if self.header_end and self.header_end in header:
            ends.append(header.index(self.header_end) + len(self.header_end))
        end = min((end for end in ends if end >= 0), default=None)
        if end is not None:
            self._header, self._state = [header[:end]], self._at_arguments
            return place + end - before
        self._header = [header]
        if len(header) == MAX_HEADER:
            self._give_back()
        return place + len(piece)

    def _at_arguments(self, text: str, place: int) -> int:
        """Begin a call if a brace follows the possible header; otherwise the header is text."""
        assert self.header is not None
        space = _SPACE.match(text, place)
        assert space is not None
        self._header.append(space[0])
        place = space.end()
        if place == len(text):
            return place
        found = self.header.fullmatch("".join(self._header).rstrip())
        if (
            text[place] != "{"
            or found is None
            or not self._writer.begin(found["name"], found.groupdict().get("id"))
        ):
            self._give_back()
            return place
        self._lead, self._header = [], []
        self._object = CallArgumentsObject(self._writer, self._ends)
        self._state = self._in_object
        return place

    def _in_object(self, text: str, place: int) -> int:
        assert self._object is not None
        end = self._object.feed(text, place)
        if not self._object.read:
            self._lead = []
        if self._object.is_held:
            self._held = text[end:]
            return len(text)
        if self._object.is_done:
            self._object, self._state = None, self._behind_call
        elif self._object.is_broken:
            self._header, self._object = self._object.read, None
            self._give_back()
        return end

    def _behind_call(self, text: str, place: int) -> int:
        place = self._skip_space(text, place)
        if place == len(text):
            return place
        if self._in_array and text[place] in ",]":
            self._in_array = text[place] == ","
            if self._in_array:
                self._lead.append(",")
                self._state = self._at_call
            else:
                self._lead = []
            return place + 1
        for tag in self._behind:
            if text.startswith(tag, place):
                self._lead.append(tag)
                if tag in self.tails:
                    self._lead = []
                else:
                    self._state = self._at_call
                return place + len(tag)
            if tag.startswith(text[place : place + len(tag)]):
                self._held = text[place:]
                return len(text)
        self._give_back()
        return place

    def _skip_space(self, text: str, place: int) -> int:
        space = _SPACE.match(text, place)
        assert space is not None
        if space[0]:
            self._lead.append(space[0])
        return space.end()

    def _give_back(self) -> None:
        """Pass the read text on as text, because it is not a call."""
        self._writer.text("".join([*self._lead, *self._header]))
        self._lead, self._header, self._in_array = [], [], False
        self._state = self._in_text
