"""`/separate_reasoning` and `/parse_function_call`: the chat route's parsers, for any text."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from openai_api.output_parser import Call, ContentText, OutputParser, ReasoningText
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.schemas.chat import MAX_TOOLS, Tool
from openai_api.tool_parsers.registry import TOOL_PARSERS
from runtime.client.large_body import read_json
from runtime.errors import InvalidRequest
from server.context import ServerContext
from server.errors import json_response
from server.native.schema import body_schema

# A name that is unknown is repeated in the answer.
ParserName = Annotated[str, msgspec.Meta(max_length=64)]


class SeparateReasoningBody(msgspec.Struct, kw_only=True):
    """`/separate_reasoning` as it arrives."""

    text: str
    reasoning_parser: ParserName
    return_blocks: bool | None = None


class ParseFunctionCallBody(msgspec.Struct, kw_only=True):
    """`/parse_function_call` as it arrives."""

    text: str
    tools: list[Tool]
    tool_call_parser: ParserName


_REASONING = msgspec.json.Decoder(SeparateReasoningBody)
_CALLS = msgspec.json.Decoder(ParseFunctionCallBody)


def create_router(context: ServerContext) -> APIRouter:
    """Both routes."""
    del context
    router = APIRouter(tags=["native"])

    @router.post("/separate_reasoning", openapi_extra=body_schema(SeparateReasoningBody))
    async def separate_reasoning(request: Request) -> Response:
        """Split a model's output into its reasoning and its answer."""
        body = await read_json(await request.body(), _REASONING)
        if body.return_blocks:
            raise InvalidRequest(
                "return_blocks is not supported by this server yet.", param="return_blocks"
            )
        parser = OutputParser(
            reasoning=REASONING_PARSERS.load(body.reasoning_parser)(prompt_is_open=False)
        )
        reasoning, content, _ = await asyncio.to_thread(_parse, parser, body.text)
        return json_response({"reasoning_text": reasoning, "text": content})

    @router.post("/parse_function_call", openapi_extra=body_schema(ParseFunctionCallBody))
    async def parse_function_call(request: Request) -> Response:
        """Read the tool calls in a model's output; `tool_index` is the place in `tools`."""
        body = await read_json(await request.body(), _CALLS)
        if len(body.tools) > MAX_TOOLS:
            raise InvalidRequest(f"tools may have at most {MAX_TOOLS} entries.", param="tools")
        names = [tool.function.name for tool in body.tools]
        parser = OutputParser(tools=TOOL_PARSERS.load(body.tool_call_parser)(names, max_calls=None))
        _, content, calls = await asyncio.to_thread(_parse, parser, body.text)
        return json_response(
            {
                "normal_text": content,
                "calls": [
                    {
                        "tool_index": names.index(found.call.name),
                        "name": found.call.name,
                        "parameters": found.call.arguments,
                    }
                    for found in calls
                ],
            }
        )

    return router


def _parse(parser: OutputParser, text: str) -> tuple[str, str, list[Call]]:
    events = parser.feed(text) + parser.finish()
    reasoning = "".join(each.text for each in events if isinstance(each, ReasoningText))
    content = "".join(each.text for each in events if isinstance(each, ContentText))
    return reasoning, content, [each for each in events if isinstance(each, Call)]
