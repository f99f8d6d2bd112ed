"""Routes of the tokenizer, for clients that count tokens or build prompts themselves."""

from __future__ import annotations

from typing import TypedDict

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.chat_template import ChatTemplate
from runtime.client.admission import EngineLimits
from runtime.errors import InvalidRequest
from runtime.eventloop.json_body import read_json, work_out
from runtime.eventloop.json_pieces import BATCH, JsonItems, JsonList
from runtime.service.context import ServiceContext
from runtime.service.operation import json_of, operation
from runtime.text.encoding import check_texts, encode_texts
from runtime.text.tokenizer import decode_texts
from server.access import Access, AccessRouter
from server.dialect import Dialect
from server.error_responses import DecodeError, json_response
from server.event_stream import json_answer
from server.request_body import check_media_type, read_raw

MAX_TEXTS = 4096
# The most characters of all texts together: about two million tokens, all listed in the answer.
MAX_TOKENIZE_CHARS = 8 * 2**20
MAX_DETOKENIZE_IDS = 2**20


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of `/tokenize`."""

    prompt: str | list[str] | None = None
    add_special_tokens: bool | None = None
    model: str | None = None
    messages: object | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of `/detokenize`."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None
    model: str | None = None


class Tokenized(TypedDict):
    """The token ids and their number. For a `prompt` that is a list, both are lists."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int


class Detokenized(TypedDict):
    """The text, under two names for different clients; a list of texts for several sequences."""

    text: str | list[str]
    prompt: str | list[str]


class TokenizerInfo(TypedDict):
    """What a client needs to build prompts: special tokens, chat template and sizes."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int
    vocab_size: int


_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


def create_router(context: ServiceContext, template: ChatTemplate | None) -> AccessRouter:
    """Create the router; `/tokenize` and `/detokenize` also exist under `/v1/`.

    Args:
        context: the server's context.
        template: the model's chat template.
    """
    router = AccessRouter(Access.KEY, tags=["native"])

    async def tokenize(request: Request) -> Response:
        """Return the token ids of one text or several."""
        if request.scope["route"].dialect is Dialect.OPENAI:
            check_media_type(request)
        body = await read_json(await read_raw(request), _TOKENIZE)
        if body.messages is not None:
            raise InvalidRequest(
                "messages is not supported here yet; send prompt.", param="messages"
            )
        if body.prompt is None:
            raise InvalidRequest("prompt must be given.", param="prompt")
        add_special = body.add_special_tokens is not False
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        _check_count(texts, "prompt")
        check_texts(texts, context.client.limits, most=MAX_TOKENIZE_CHARS)
        tokens = await encode_texts(context.tokenizer, texts, add_special_tokens=add_special)
        counts = [len(ids) for ids in tokens]
        is_one = isinstance(body.prompt, str)
        return json_answer(
            {
                "tokens": _numbers(tokens[0]) if is_one else JsonItems(tokens, sum(counts)),
                "count": counts[0] if is_one else counts,
                "max_model_len": context.tokenizer.model_max_length
                or context.client.limits.context_len,
            }
        )

    async def detokenize(request: Request) -> Response:
        """Return the text of one sequence of token ids or several."""
        if request.scope["route"].dialect is Dialect.OPENAI:
            check_media_type(request)
        raw = await read_raw(request)
        body = await read_json(raw, _DETOKENIZE)
        ids = await work_out(len(raw), _sequences, body.tokens, context.client.limits)
        is_one = not (body.tokens and isinstance(body.tokens[0], list))
        _check_count(ids, "tokens")
        skip = body.skip_special_tokens is not False
        texts = await decode_texts(context.tokenizer, ids, skip_special_tokens=skip)
        found = texts[0] if is_one else texts
        # `prompt` is vLLM's name for the text.
        return json_response({"text": found, "prompt": found})

    async def tokenizer_info() -> Response:
        """Return what a client needs to build prompts: special tokens and the chat template."""
        tokenizer = context.tokenizer
        tokenizer.check_present()
        info: TokenizerInfo = {
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.pad_token,
            "unk_token": tokenizer.named_tokens.get("unk_token"),
            "chat_template": None if template is None else template.text,
            "model_max_length": tokenizer.model_max_length or context.client.limits.context_len,
            "vocab_size": tokenizer.vocab_size,
        }
        return json_response(info)

    router.add_api_route(
        "/tokenizer_info",
        tokenizer_info,
        methods=["GET"],
        openapi_extra=operation(ok=json_of(TokenizerInfo), refuses=(400,)),
    )

    for prefix in ("", "/v1"):
        router.add_api_route(
            f"{prefix}/tokenize",
            tokenize,
            methods=["POST"],
            openapi_extra=operation(TokenizeBody, ok=json_of(Tokenized)),
        )
        router.add_api_route(
            f"{prefix}/detokenize",
            detokenize,
            methods=["POST"],
            openapi_extra=operation(DetokenizeBody, ok=json_of(Detokenized)),
        )
    return router


def _sequences(tokens: list[int | list[int]], limits: EngineLimits) -> list[list[int]]:
    """Check the token ids of a body and return them as sequences; a flat list is one sequence."""
    nested = [each for each in tokens if isinstance(each, list)]
    if nested and len(nested) < len(tokens):
        raise InvalidRequest("tokens must be a list of integers or a list of such lists.")
    sequences = nested or [[each for each in tokens if isinstance(each, int)]]
    num_ids = sum(map(len, sequences))
    if num_ids > MAX_DETOKENIZE_IDS:
        raise InvalidRequest(
            f"tokens may hold at most {MAX_DETOKENIZE_IDS} ids, got {num_ids}.", param="tokens"
        )
    for ids in sequences:
        if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
            raise DecodeError(f"Token ids must be in [0, {limits.vocab_size}).")
    return sequences


def _numbers(ids: list[int]) -> JsonList:
    return JsonList(len(ids), ids, batch=64 * BATCH)


def _check_count(items: list[str] | list[list[int]], name: str) -> None:
    if len(items) > MAX_TEXTS:
        raise InvalidRequest(f"{name} may have at most {MAX_TEXTS} entries.", param=name)
