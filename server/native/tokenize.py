"""`/tokenize` and `/detokenize`: the server's own tokenizer, for clients that count tokens."""

from __future__ import annotations

import asyncio

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.access import Access, AccessRouter
from openai_api.request_body import check_media_type
from runtime.client.admission import check_text_size
from runtime.client.json_body import decode_body
from runtime.errors import InvalidRequest
from runtime.service.context import ServiceContext
from server.error_responses import DecodeError, json_response
from server.native.schema import body_schema

MAX_TEXTS = 4096
_LONG_TOKENS = 16 * 1024


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`/tokenize` as it arrives."""

    prompt: str | list[str] | None = None
    add_special_tokens: bool | None = None
    model: str | None = None
    messages: object | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """`/detokenize` as it arrives."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None
    model: str | None = None


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Both routes, also under `/v1/`."""
    router = AccessRouter(Access.KEY, tags=["native"])

    async def tokenize(request: Request) -> Response:
        """Token ids of one text or several."""
        if request.scope["route"].speaks_openai:
            check_media_type(request)
        body = decode_body(await request.body(), _TOKENIZE)
        if body.messages is not None:
            raise InvalidRequest(
                "messages is not supported here yet; send prompt.", param="messages"
            )
        if body.prompt is None:
            raise InvalidRequest("prompt must be given.", param="prompt")
        add_special = body.add_special_tokens is not False
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        _check_count(texts, "prompt")
        tokens = []
        for text in texts:
            check_text_size(text, context.client.limits)
            tokens.append(await context.tokenizer.encode_async(text, add_special))
        counts = [len(ids) for ids in tokens]
        is_one = isinstance(body.prompt, str)
        return json_response(
            {
                "tokens": tokens[0] if is_one else tokens,
                "count": counts[0] if is_one else counts,
                "max_model_len": context.tokenizer.model_max_length
                or context.client.limits.context_len,
            }
        )

    async def detokenize(request: Request) -> Response:
        """Text of one sequence of token ids or several."""
        if request.scope["route"].speaks_openai:
            check_media_type(request)
        body = decode_body(await request.body(), _DETOKENIZE)
        flat = [each for each in body.tokens if isinstance(each, int)]
        nested = [each for each in body.tokens if isinstance(each, list)]
        if flat and nested:
            raise InvalidRequest("tokens must be a list of integers or a list of such lists.")
        _check_count(nested, "tokens")
        skip = body.skip_special_tokens is not False
        texts = [await _decode(context, ids, skip) for ids in nested or [flat]]
        return json_response({"text": texts if nested else texts[0]})

    for prefix in ("", "/v1"):
        router.add_api_route(
            f"{prefix}/tokenize",
            tokenize,
            methods=["POST"],
            openapi_extra=body_schema(TokenizeBody),
        )
        router.add_api_route(
            f"{prefix}/detokenize",
            detokenize,
            methods=["POST"],
            openapi_extra=body_schema(DetokenizeBody),
        )
    return router


async def _decode(context: ServiceContext, ids: list[int], skip_special_tokens: bool) -> str:
    width = context.client.limits.vocab_size
    if ids and not (min(ids) >= 0 and max(ids) < width):
        raise DecodeError(f"Token ids must be in [0, {width}).")
    if len(ids) <= _LONG_TOKENS:
        return context.tokenizer.decode(ids, skip_special_tokens)
    return await asyncio.to_thread(context.tokenizer.decode, ids, skip_special_tokens)


def _check_count(items: list[str] | list[list[int]], name: str) -> None:
    if len(items) > MAX_TEXTS:
        raise InvalidRequest(f"{name} may have at most {MAX_TEXTS} entries.", param=name)
