"""vLLM's `/pooling`: returns vectors of texts or of their tokens, or class probabilities."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, TypedDict

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.endpoints.embeddings import text_inputs, written
from openai_api.schemas.answers import EmbeddingUsage
from runtime.checkpoint.model_spec import ModelSpec
from runtime.errors import InvalidRequest
from runtime.eventloop.json_body import read_json
from runtime.eventloop.json_pieces import JsonItems
from runtime.requests.sampling_params import Int64
from runtime.service.classes import classify, require_scores
from runtime.service.context import ServiceContext
from runtime.service.generation import new_id
from runtime.service.operation import json_of, operation
from runtime.service.text_embeddings import TextInput, TextOptions, embed
from runtime.service.token_vectors import TokenVectorsJson, embed_tokens
from server.access import Access, AccessRouter
from server.event_stream import json_answer, unless_disconnected
from server.request_body import read_raw

Task = Literal["embed", "token_embed", "classify"]


class PoolingBody(msgspec.Struct, kw_only=True):
    """The body of `/pooling`; unknown keys are ignored.

    Attributes:
        input: a text, texts, token ids, or lists of token ids.
        task: what is returned for each text: `embed` for a vector, `token_embed` for a vector for
            each token, `classify` for the probabilities of its classes. By default it is what the
            model was made for.
        encoding_format: `float` for lists of numbers, `base64` for each text's numbers as
            little-endian float32 bytes.
    """

    input: str | list[str | int | list[int]]
    model: str | None = None
    task: Task | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    rid: str | list[str] | None = None
    priority: Int64 = 0
    data_parallel_rank: int | None = None
    user: str | None = None


class Pooled(TypedDict):
    """The result for one input."""

    index: int
    object: Literal["pooling"]
    data: list[float | list[float]] | str


class PooledList(TypedDict):
    """The answer of `/pooling`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Pooled]
    usage: EmbeddingUsage


_DECODER = msgspec.json.Decoder(PoolingBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of `/pooling`."""
    router = AccessRouter(Access.KEY, tags=["native"])

    async def pool_texts(request: Request) -> Response:
        """Return vectors of texts or of their tokens, or probabilities of their classes."""
        body = await read_json(await read_raw(request), _DECODER)
        data, num_tokens, cost = await unless_disconnected(request.receive, _pool(context, body))
        items = ({"index": i, "object": "pooling", "data": each} for i, each in enumerate(data))
        answer = {
            "id": new_id("pool", None),
            "object": "list",
            "created": int(time.time()),
            "model": body.model or context.served_model_name,
            # There may be millions of numbers, so they are encoded while they are sent.
            "data": JsonItems(items, cost),
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
        return json_answer(answer)

    documented = operation(PoolingBody, ok=json_of(PooledList))
    router.add_api_route("/pooling", pool_texts, methods=["POST"], openapi_extra=documented)
    return router


async def _pool(context: ServiceContext, body: PoolingBody) -> tuple[Sequence[object], int, int]:
    """Return each text's result, the number of all tokens, and the number of all numbers."""
    given: list[TextInput] = text_inputs(body.input)
    options = TextOptions(
        rid=body.rid,
        dimensions=body.dimensions,
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        priority=body.priority,
        dp_rank=body.data_parallel_rank,
    )
    model = context.model
    task = body.task or _own_task(model)
    if task == "token_embed":
        texts = await embed_tokens(context, given, options)
        packed = [TokenVectorsJson(each, body.encoding_format) for each in texts]
        return packed, sum(each.prompt_tokens for each in texts), sum(each.cost for each in packed)
    if task == "classify":
        require_scores(model, "/pooling with task classify")
    elif model.gives == "scores":
        raise InvalidRequest(
            "task must be classify: this server's model scores texts.", param="task"
        )
    found = await embed(context, given, options)
    numbers: list[Sequence[float]] = [
        classify(model, each).probabilities if task == "classify" else each.numbers
        for each in found
    ]
    data = [written(each, body.encoding_format) for each in numbers]
    return data, sum(each.prompt_tokens for each in found), sum(map(len, numbers))


def _own_task(model: ModelSpec) -> Task:
    if model.gives == "scores":
        return "classify"
    return "token_embed" if model.pooling.per_token else "embed"
