"""`/separate_reasoning` and `/parse_function_call`: applies the chat route's parsers to a text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, TypedDict

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.output_parser import (
    Call,
    ContentText,
    OutputEvent,
    OutputParser,
    ReasoningText,
    WholeCalls,
)
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.schemas.chat import MAX_TOOLS, FunctionTool
from openai_api.tool_parsers.registry import TOOL_PARSERS
from runtime.errors import InvalidRequest, Overloaded
from runtime.eventloop.json_body import read_json
from runtime.eventloop.offload import OffloadPool
from runtime.requests.bounds import at_most
from runtime.service.context import ServiceContext
from runtime.service.operation import json_of, operation
from server.access import Access, AccessRouter
from server.error_responses import json_response
from server.event_stream import unless_disconnected

# An unknown name is repeated in the error message, so its length is limited.
ParserName = Annotated[str, msgspec.Meta(max_length=64)]

# The most characters of a text: about a quarter of a million tokens, whose parsing takes a second
# or two.
MAX_TEXT_LEN = 1024 * 1024
Text = Annotated[str, at_most(chars=MAX_TEXT_LEN)]
# Characters that are parsed in one slice, of at most 20 ms. Between slices, other texts get their
# turn, and a text whose client has left is dropped.
SLICE_CHARS = 8 * 1024
MAX_AT_ONCE = 32
_TIMEOUT_S = 30.0
# One thread, because parsing holds the GIL: more threads would only compete with the event loop.
_PARSING = OffloadPool("parsing", workers=1, max_queued=2 * MAX_AT_ONCE, timeout_s=_TIMEOUT_S)


class SeparateReasoningBody(msgspec.Struct, kw_only=True):
    """The body of `/separate_reasoning`."""

    text: Text
    reasoning_parser: ParserName
    return_blocks: bool | None = None


class ParseFunctionCallBody(msgspec.Struct, kw_only=True):
    """The body of `/parse_function_call`."""

    text: Text
    tools: Annotated[list[FunctionTool], at_most(MAX_TOOLS)]
    tool_call_parser: ParserName


class SeparatedReasoning(TypedDict):
    """The reasoning and the answer in a model's output."""

    reasoning_text: str
    text: str


class ParsedCall(TypedDict):
    """One call; `parameters` is JSON text, as the model wrote it."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(TypedDict):
    """The calls in a text, and the text around them."""

    normal_text: str
    calls: list[ParsedCall]


_REASONING = msgspec.json.Decoder(SeparateReasoningBody)
_CALLS = msgspec.json.Decoder(ParseFunctionCallBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of both routes."""
    del context
    router = AccessRouter(Access.KEY, tags=["native"])
    parsing = _Parsing()

    @router.post(
        "/separate_reasoning",
        openapi_extra=operation(SeparateReasoningBody, ok=json_of(SeparatedReasoning)),
    )
    async def separate_reasoning(request: Request) -> Response:
        """Split a model's output into its reasoning and its answer."""
        body = await read_json(await request.body(), _REASONING)
        if body.return_blocks:
            raise InvalidRequest(
                "return_blocks is not supported by this server yet.", param="return_blocks"
            )
        _check_length(body.text)
        reasoning = REASONING_PARSERS.load(body.reasoning_parser)(prompt_is_open=False)
        found = _Found(OutputParser(reasoning=reasoning))
        return await unless_disconnected(
            request.receive, parsing.answer(found, body.text, _separated)
        )

    @router.post(
        "/parse_function_call",
        openapi_extra=operation(ParseFunctionCallBody, ok=json_of(ParsedCalls)),
    )
    async def parse_function_call(request: Request) -> Response:
        """Parse the tool calls in a model's output; `tool_index` is the index in `tools`."""
        body = await read_json(await request.body(), _CALLS)
        if len(body.tools) > MAX_TOOLS:
            raise InvalidRequest(f"tools may have at most {MAX_TOOLS} entries.", param="tools")
        _check_length(body.text)
        names = [tool.function.name for tool in body.tools]
        functions = {tool.function.name: tool.function.parameters or {} for tool in body.tools}
        kind = TOOL_PARSERS.load(body.tool_call_parser)
        found = _Found(OutputParser(tools=kind(functions, max_calls=None)))
        work = parsing.answer(found, body.text, partial(_called, names=names))
        return await unless_disconnected(request.receive, work)

    return router


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT_LEN:
        raise InvalidRequest(
            f"text has {len(text)} characters; at most {MAX_TEXT_LEN} are accepted.", param="text"
        )


class _Found:
    """What the parser has found in a text so far."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self._whole = WholeCalls()
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[Call] = []

    def feed(self, text: str) -> None:
        self._take(self._parser.feed(text))

    def finish(self) -> None:
        self._take(self._parser.finish())

    def _take(self, events: list[OutputEvent]) -> None:
        for event in self._whole.feed(events):
            if isinstance(event, ReasoningText):
                self.reasoning.append(event.text)
            elif isinstance(event, ContentText):
                self.content.append(event.text)
            else:
                self.calls.append(event)


class _Parsing:
    """Parses several texts in turns, one slice of a text at a time."""

    def __init__(self) -> None:
        self._num_running = 0

    async def answer(
        self, found: _Found, text: str, answer: Callable[[_Found], Response]
    ) -> Response:
        """Parse a text and return the response.

        Args:
            found: collects what the parser finds.
            text: the model's output.
            answer: makes the response from `found`.

        Raises:
            Overloaded: too many texts are being parsed, or parsing took too long because of the
                others.
        """
        busy = Overloaded("The server is busy with the parsing of other requests.")
        if self._num_running == MAX_AT_ONCE:
            raise busy
        self._num_running += 1
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                for begin in range(0, len(text), SLICE_CHARS):
                    await _PARSING.run(found.feed, text[begin : begin + SLICE_CHARS])
                await _PARSING.run(found.finish)
                # The response is encoded on the thread too: encoding a hundred thousand calls takes
                # as long as parsing them.
                return await _PARSING.run(answer, found)
        except TimeoutError:
            raise busy from None
        finally:
            self._num_running -= 1


def _separated(found: _Found) -> Response:
    return json_response(
        {"reasoning_text": "".join(found.reasoning), "text": "".join(found.content)}
    )


def _called(found: _Found, names: list[str]) -> Response:
    # If two tools have the same name, the index of the first one is reported.
    places = {name: index for index, name in reversed(list(enumerate(names)))}
    return json_response(
        {
            "normal_text": "".join(found.content),
            "calls": [
                {"tool_index": places[call.name], "name": call.name, "parameters": call.arguments}
                for call in found.calls
            ],
        }
    )
