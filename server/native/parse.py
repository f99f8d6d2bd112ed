"""`/separate_reasoning` and `/parse_function_call`: the chat route's parsers, for any text."""

from __future__ import annotations

from typing import Annotated, TypedDict

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.operation import json_of, operation
from openai_api.output_parser import (
    Call,
    ContentText,
    OutputParser,
    ReasoningText,
    WholeCalls,
)
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.schemas.chat import MAX_TOOLS, FunctionTool
from openai_api.tool_parsers.registry import TOOL_PARSERS
from runtime.client.json_body import read_json
from runtime.client.offload import OffloadPool
from runtime.errors import InvalidRequest
from runtime.requests.bounds import at_most
from runtime.service.context import ServiceContext
from server.access import Access, AccessRouter
from server.error_responses import json_response

# A name that is unknown is repeated in the answer.
ParserName = Annotated[str, msgspec.Meta(max_length=64)]

# Characters: the output of about a quarter of a million tokens, read in a fifth of a second.
MAX_TEXT_LEN = 1024 * 1024
Text = Annotated[str, at_most(chars=MAX_TEXT_LEN)]
# One thread: parsing holds the interpreter, so more would only take turns with the event loop.
_PARSING = OffloadPool("parsing", workers=1, max_queued=32, timeout_s=30.0)


class SeparateReasoningBody(msgspec.Struct, kw_only=True):
    """`/separate_reasoning` as it arrives."""

    text: Text
    reasoning_parser: ParserName
    return_blocks: bool | None = None


class ParseFunctionCallBody(msgspec.Struct, kw_only=True):
    """`/parse_function_call` as it arrives."""

    text: Text
    tools: Annotated[list[FunctionTool], at_most(MAX_TOOLS)]
    tool_call_parser: ParserName


class SeparatedReasoning(TypedDict):
    """Both parts."""

    reasoning_text: str
    text: str


class ParsedCall(TypedDict):
    """A call; `parameters` is JSON text, as the model wrote it."""

    tool_index: int
    name: str
    parameters: str


class ParsedCalls(TypedDict):
    """The calls, and the text around them."""

    normal_text: str
    calls: list[ParsedCall]


_REASONING = msgspec.json.Decoder(SeparateReasoningBody)
_CALLS = msgspec.json.Decoder(ParseFunctionCallBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Both routes."""
    del context
    router = AccessRouter(Access.KEY, tags=["native"])

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
        return await _PARSING.run(_separate, OutputParser(reasoning=reasoning), body.text)

    @router.post(
        "/parse_function_call",
        openapi_extra=operation(ParseFunctionCallBody, ok=json_of(ParsedCalls)),
    )
    async def parse_function_call(request: Request) -> Response:
        """Read the tool calls in a model's output; `tool_index` is the place in `tools`."""
        body = await read_json(await request.body(), _CALLS)
        if len(body.tools) > MAX_TOOLS:
            raise InvalidRequest(f"tools may have at most {MAX_TOOLS} entries.", param="tools")
        _check_length(body.text)
        names = [tool.function.name for tool in body.tools]
        functions = {tool.function.name: tool.function.parameters or {} for tool in body.tools}
        kind = TOOL_PARSERS.load(body.tool_call_parser)
        parser = OutputParser(tools=kind(functions, max_calls=None))
        return await _PARSING.run(_find_calls, parser, body.text, names)

    return router


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT_LEN:
        raise InvalidRequest(
            f"text has {len(text)} characters; at most {MAX_TEXT_LEN} are taken.", param="text"
        )


# Both make the answer's bytes, too: a hundred thousand calls take as long to write as to find.


def _separate(parser: OutputParser, text: str) -> Response:
    reasoning, content, _ = _parse(parser, text)
    return json_response({"reasoning_text": reasoning, "text": content})


def _find_calls(parser: OutputParser, text: str, names: list[str]) -> Response:
    _, content, calls = _parse(parser, text)
    # Of a name that is there twice, the first.
    places = {name: index for index, name in reversed(list(enumerate(names)))}
    return json_response(
        {
            "normal_text": content,
            "calls": [
                {
                    "tool_index": places[found.name],
                    "name": found.name,
                    "parameters": found.arguments,
                }
                for found in calls
            ],
        }
    )


def _parse(parser: OutputParser, text: str) -> tuple[str, str, list[Call]]:
    events = list(WholeCalls().feed(parser.feed(text) + parser.finish()))
    reasoning = "".join(each.text for each in events if isinstance(each, ReasoningText))
    content = "".join(each.text for each in events if isinstance(each, ContentText))
    return reasoning, content, [each for each in events if isinstance(each, Call)]
