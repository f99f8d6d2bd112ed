"""`/encode` and `/classify`: returns vectors or scores of texts."""

from __future__ import annotations

import msgspec
from fastapi import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.eventloop.json_body import read_json
from runtime.eventloop.json_pieces import JsonList
from runtime.requests.sampling_params import Int64
from runtime.service.context import ServiceContext
from runtime.service.operation import json_of, operation
from runtime.service.text_embeddings import (
    Embedding,
    EmbeddingAnswer,
    TextInput,
    TextOptions,
    describe,
    embed,
)
from server.access import Access, AccessRouter
from server.error_responses import json_response
from server.event_stream import json_answer, unless_disconnected
from server.request_body import read_raw


class EncodeBody(msgspec.Struct, kw_only=True):
    """The body of `/encode` and `/classify`; unknown keys are ignored."""

    text: str | list[str | list[str]] | None = None
    input_ids: list[int | list[int]] | None = None
    rid: str | list[str] | None = None
    dimensions: int | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    priority: Int64 = 0
    data_parallel_rank: int | None = None
    image_data: object | None = None
    lora_path: object | None = None


_DECODER = msgspec.json.Decoder(EncodeBody)


async def encode(context: ServiceContext, body: EncodeBody) -> tuple[list[Embedding], bool]:
    """Return the vectors or scores, and whether the request has a single input.

    Raises:
        InvalidRequest: a value in `body` is wrong.
    """
    for name in ("image_data", "lora_path"):
        if getattr(body, name):
            raise InvalidRequest(f"{name} is not supported by this server yet.", param=name)
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("Exactly one of text and input_ids must be given.", param="text")
    given, is_single = _inputs(body)
    options = TextOptions(
        rid=body.rid,
        dimensions=body.dimensions,
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        priority=body.priority,
        dp_rank=body.data_parallel_rank,
    )
    return await embed(context, given, options), is_single


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of both routes, which have the same handler."""
    router = AccessRouter(Access.KEY, tags=["native"])

    async def encode_texts(request: Request) -> Response:
        """Return the vector or scores of one text (as an object) or of several (as a list)."""
        body = await read_json(await read_raw(request), _DECODER)
        found, is_single = await unless_disconnected(request.receive, encode(context, body))
        if is_single:
            return json_response(describe(found[0]))
        # A million numbers may have to be encoded, which is done while they are sent.
        num_numbers = sum(len(each.numbers) for each in found)
        return json_answer(JsonList(num_numbers, map(describe, found)))

    documented = operation(EncodeBody, ok=json_of(EmbeddingAnswer, list[EmbeddingAnswer]))
    for path in ("/encode", "/classify"):
        router.add_api_route(path, encode_texts, methods=["POST", "PUT"], openapi_extra=documented)
    return router


def _inputs(body: EncodeBody) -> tuple[list[TextInput], bool]:
    """Return the texts or lists of ids, and whether the input is a single one outside a list."""
    if body.input_ids is not None:
        ids = [each for each in body.input_ids if isinstance(each, int)]
        lists = [each for each in body.input_ids if not isinstance(each, int)]
        if ids and lists:
            raise InvalidRequest(
                "input_ids must hold ids, or lists of ids alone.", param="input_ids"
            )
        return ([ids], True) if ids else ([*lists], False)
    if isinstance(body.text, str):
        return [body.text], True
    return [_text_or_pair(each) for each in body.text or []], False


def _text_or_pair(given: str | list[str]) -> TextInput:
    if isinstance(given, str):
        return given
    if len(given) != 2:  # It must be a query and a document.
        raise InvalidRequest(
            f"A list within text must be a pair of texts, got {len(given)}.", param="text"
        )
    return given[0], given[1]
