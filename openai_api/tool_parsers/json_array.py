"""A JSON array of `{"name", "parameters"}` objects: what a forced call is written as."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import orjson

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.tool_parser import CallForm, ParsedCall


class _Call(msgspec.Struct):
    name: str
    parameters: dict[str, object]


_DECODER = msgspec.json.Decoder(_Call)


class JsonArrayParser:
    """A call leaves as soon as its object is closed; what is cut off comes back as text."""

    markers: tuple[str, ...] = ()
    # A grammar makes the model write so; no model does by itself.
    signs = Signs()
    call_form: CallForm | None = None

    def __init__(self, names: Collection[str], *, max_calls: int | None) -> None:
        """Accept calls of these functions only, and at most `max_calls` of them."""
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._num_calls = 0
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._object: list[str] = []

    def feed(self, text: str) -> list[str | ParsedCall]:
        """Take more output: the calls that are complete."""
        out: list[str | ParsedCall] = []
        begin = 0
        for place, char in enumerate(text):
            if self._in_string:
                self._in_string = char != '"' or self._is_escaped
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._in_string = self._depth > 0
            elif char == "{":
                if not self._depth:
                    begin = place
                self._depth += 1
            elif char == "}" and self._depth:
                self._depth -= 1
                if not self._depth:
                    self._object.append(text[begin : place + 1])
                    self._close(out)
                    begin = place + 1
        if self._depth:
            self._object.append(text[begin:])
        return out

    def finish(self) -> list[str | ParsedCall]:
        """The output is over: a call that is not complete is text."""
        rest, self._object = "".join(self._object), []
        return [rest] if rest else []

    def _close(self, out: list[str | ParsedCall]) -> None:
        payload, self._object = "".join(self._object), []
        try:
            call = _DECODER.decode(payload)
            arguments = orjson.dumps(call.parameters).decode()
        except (msgspec.DecodeError, UnicodeError, RecursionError, orjson.JSONEncodeError):
            out.append(payload)
            return
        if call.name not in self._names:
            out.append(payload)
        elif self._max_calls is None or self._num_calls < self._max_calls:
            self._num_calls += 1
            out.append(ParsedCall(call.name, arguments))
