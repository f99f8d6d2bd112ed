"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen 3.

A call leaves the parser when it is complete: what a client receives is always valid JSON, and text
that only looked like a call comes back as text, none of it lost.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec
import orjson

from openai_api.parser_signs import Signs
from openai_api.tag_scan import UntilTag
from openai_api.tool_parsers.tool_parser import CallForm, ParsedCall

logger = logging.getLogger(__name__)

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


def _begin(name: str) -> str:
    return f'{OPEN_TAG}\n{{"name": {orjson.dumps(name).decode()}, "arguments": '


class _Call(msgspec.Struct):
    name: str
    arguments: dict[str, object] | str = msgspec.field(default_factory=dict)


_DECODER = msgspec.json.Decoder(_Call)
_OBJECT_DECODER = msgspec.json.Decoder(dict[str, object])


class HermesParser:
    """Turns complete `<tool_call>` blocks into calls; whitespace around a block is dropped."""

    markers: tuple[str, ...] = (OPEN_TAG, CLOSE_TAG)
    signs = Signs(
        template=(OPEN_TAG, '"name":', '"arguments":'),
        response={"open": OPEN_TAG, "content": "json"},
    )
    call_form: CallForm | None = CallForm(OPEN_TAG, _begin, f"}}\n{CLOSE_TAG}", separator="\n")

    def __init__(self, names: Collection[str], *, max_calls: int | None) -> None:
        """Accept calls of these functions only, and at most `max_calls` of them."""
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._num_calls = 0
        self._has_warned = False
        self._outside = UntilTag(OPEN_TAG)
        self._inside: UntilTag | None = None
        self._payload: list[str] = []

    def feed(self, text: str) -> list[str | ParsedCall]:
        """Take more output: texts and calls in their order."""
        out: list[str | ParsedCall] = []
        place: int | None = 0
        while place is not None and place < len(text):
            place = (
                self._feed_outside(text, place, out)
                if self._inside is None
                else self._feed_inside(text, place, out)
            )
        return out

    def finish(self) -> list[str | ParsedCall]:
        """The output is over: what was held back; an unclosed call counts if it is complete."""
        out: list[str | ParsedCall] = []
        if self._inside is not None:
            self._payload.append(self._inside.finish())
            self._inside = None
            self._close(out, closed=False)
        held = self._outside.finish()
        if held and not (self._num_calls and held.isspace()):
            out.append(held)
        return out

    def _feed_outside(self, text: str, begin: int, out: list[str | ParsedCall]) -> int | None:
        passed, end = self._outside.feed(text, begin)
        if passed:
            out.append(passed)
        if end is not None:
            self._inside = UntilTag(CLOSE_TAG, keep_space=True)
        return end

    def _feed_inside(self, text: str, begin: int, out: list[str | ParsedCall]) -> int | None:
        assert self._inside is not None
        passed, end = self._inside.feed(text, begin)
        self._payload.append(passed)
        if end is not None:
            self._inside = None
            self._close(out, closed=True)
        return end

    def _close(self, out: list[str | ParsedCall], *, closed: bool) -> None:
        payload = "".join(self._payload)
        self._payload = []
        call = self._parse(payload)
        if call is None:
            out.append(OPEN_TAG + payload + (CLOSE_TAG if closed else ""))
        elif self._max_calls is None or self._num_calls < self._max_calls:
            self._num_calls += 1
            out.append(call)

    def _parse(self, payload: str) -> ParsedCall | None:
        try:
            call = _DECODER.decode(payload)
            arguments = call.arguments
            if isinstance(arguments, str):
                arguments = _OBJECT_DECODER.decode(arguments)
            text = orjson.dumps(arguments).decode()
        except (msgspec.DecodeError, UnicodeError, RecursionError, orjson.JSONEncodeError):
            return None
        if call.name not in self._names:
            if not self._has_warned:
                # Once: an output may hold a hundred thousand of them.
                self._has_warned = True
                logger.warning("The model called a function that the request does not offer")
            return None
        return ParsedCall(call.name, text)
