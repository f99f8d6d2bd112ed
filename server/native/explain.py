"""`/explain_cache`: tells where a request's prompt diverges from the prefix cache."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypedDict

import msgspec
from fastapi import Request
from starlette.responses import Response

from anthropic_api.conversation import prompt_request
from anthropic_api.message_request import CountTokensRequest
from openai_api.call import Call
from openai_api.chat_prompt import build_chat_prompt
from openai_api.chat_run import settled
from openai_api.endpoints.responses import prompt_of_response
from openai_api.openai_context import OpenAIContext
from openai_api.request_body import read_body
from openai_api.responses.chat_of_items import set_generation
from openai_api.schemas.chat import DECODER, ChatCompletionRequest, check_chat_request
from openai_api.schemas.common import cache_namespace
from openai_api.schemas.responses import DECODER as RESPONSE_DECODER
from runtime.eventloop.heavy_work import aside
from runtime.service.cache_break import CacheBreak, cached_prefix, check_reported
from runtime.service.operation import json_of, operation
from server.access import Access, AccessRouter
from server.event_stream import json_answer
from server.request_body import check_media_type, read_raw

Route = Literal["/v1/chat/completions", "/v1/responses", "/v1/messages"]


class ExplainCacheBody(msgspec.Struct, kw_only=True):
    """The body of `/explain_cache`.

    Attributes:
        body: the body of the request to explain, as it would be sent to `route`.
        route: the route of that request.
    """

    body: dict[str, Any]
    route: Route = "/v1/chat/completions"


class CacheExplained(TypedDict):
    """How much of the prompt is cached; `cache_break` is null if the whole prompt is cached."""

    prompt_tokens: int
    cached_tokens: int
    cache_break: CacheBreak | None


ReadChat = Callable[[bytes, OpenAIContext], Awaitable[ChatCompletionRequest]]
_DECODER = msgspec.json.Decoder(ExplainCacheBody)
_MESSAGES = msgspec.json.Decoder(CountTokensRequest)


def create_router(openai: OpenAIContext) -> AccessRouter:
    """Create the router of `/explain_cache`."""
    router = AccessRouter(Access.KEY, tags=["native"])

    @router.post(
        "/explain_cache", openapi_extra=operation(ExplainCacheBody, ok=json_of(CacheExplained))
    )
    async def explain_cache(request: Request) -> Response:
        """Report how much of a prompt is cached, and which token is the first uncached one."""
        check_media_type(request)
        asked = await read_body(Call(await read_raw(request)), _DECODER)
        check_reported(openai.service, "/explain_cache")
        data = await aside(asked.body, msgspec.json.encode, asked.body)
        chat = await _READERS[asked.route](data, openai)
        prompt = await build_chat_prompt(chat, openai)
        namespace = cache_namespace(chat)
        found = await cached_prefix(openai.service, prompt.input_ids, namespace, prompt.images)
        explained: CacheExplained = {
            "prompt_tokens": len(prompt.input_ids),
            "cached_tokens": found.num_cached,
            "cache_break": found.broken,
        }
        return json_answer(explained)

    return router


async def _chat(data: bytes, openai: OpenAIContext) -> ChatCompletionRequest:
    del openai
    chat = await read_body(Call(data), DECODER)
    await aside(chat, settled, chat)
    return chat


async def _response(data: bytes, openai: OpenAIContext) -> ChatCompletionRequest:
    asked = await read_body(Call(data), RESPONSE_DECODER)
    chat = await prompt_of_response(asked, openai)
    set_generation(chat, asked)
    return chat


async def _message(data: bytes, openai: OpenAIContext) -> ChatCompletionRequest:
    asked = await read_body(Call(data), _MESSAGES)
    chat = await aside(asked, prompt_request, asked, sees=openai.sees)
    await aside(chat, check_chat_request, chat)
    return chat


_READERS: dict[Route, ReadChat] = {
    "/v1/chat/completions": _chat,
    "/v1/responses": _response,
    "/v1/messages": _message,
}
