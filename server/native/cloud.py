"""Routes that cloud platforms call: SageMaker's `/ping`, and Vertex AI's route.

SageMaker's other route, `/invocations`, is the same as chat; it is in `openai_api.routes`.
"""

from __future__ import annotations

from typing import Any, TypedDict

import msgspec
from fastapi import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.eventloop.absent_nulls import convert
from runtime.eventloop.body_errors import InvalidBody, explain
from runtime.eventloop.json_body import read_json, work_out
from runtime.service.context import ServiceContext
from runtime.service.generate_answer import GenerateAnswer
from runtime.service.generate_request import GenerateBody
from runtime.service.generation import as_pieces, generate_native
from runtime.service.operation import json_of, operation
from server.access import Access, AccessRouter
from server.error_responses import json_response
from server.event_stream import json_answer, unless_disconnected
from server.native.health import HEALTH, answer_health
from server.request_body import read_raw

_KINDS = ("text", "input_ids", "input_embeds")
_MEDIA = "image_data"


class VertexBody(msgspec.Struct, kw_only=True):
    """Vertex AI's body: `parameters` are fields of `/generate`, and each instance is a prompt."""

    instances: list[dict[str, Any]]
    parameters: dict[str, Any] | None = None


class VertexAnswer(TypedDict):
    """Vertex AI's answer: the answer of `/generate` for each instance."""

    predictions: list[GenerateAnswer]


_DECODER = msgspec.json.Decoder(VertexBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create both routes. The path of Vertex AI's route comes from an environment variable."""
    router = AccessRouter(Access.KEY, tags=["native"])

    @router.get("/ping", tags=["health"], openapi_extra=HEALTH)
    async def ping() -> Response:
        """Answer as `/health` does. Unlike `/health`, this route requires the key."""
        return answer_health(context)

    documented = operation(VertexBody, ok=json_of(VertexAnswer))

    @router.post(context.config.http.vertex_route, openapi_extra=documented)
    async def vertex_generate(request: Request) -> Response:
        """Continue every instance; `predictions` are the answers of `/generate`, in order."""
        raw = await read_raw(request)
        body = await read_json(raw, _DECODER)
        if not body.instances:
            return json_response({"predictions": []})
        asked = await work_out(len(raw), _as_generate, body)
        answers = await unless_disconnected(request.receive, _answers(context, asked, len(raw)))
        return json_answer({"predictions": as_pieces(answers)})

    return router


async def _answers(
    context: ServiceContext, body: GenerateBody, body_size: int
) -> list[dict[str, Any]]:
    generation = await generate_native(context, body, body_size)
    return await generation.whole()


def _as_generate(body: VertexBody) -> GenerateBody:
    parameters = body.parameters or {}
    for name in (*_KINDS, _MEDIA):
        if name in parameters:
            raise InvalidRequest(f"{name} belongs in the instances.", param="parameters")
    if parameters.get("stream"):
        raise InvalidRequest("stream is not possible on this route.", param="stream")
    kind = next((name for name in _KINDS if name in body.instances[0]), None)
    if kind is None:
        raise InvalidRequest(
            f"An instance must have one of {', '.join(_KINDS)}.", param="instances"
        )
    if any(kind not in instance for instance in body.instances):
        raise InvalidRequest(
            f"Every instance must have {kind}, as the first one has.", param="instances"
        )
    if any(instance.get(_MEDIA) for instance in body.instances):
        raise InvalidRequest(
            f"{_MEDIA} is not accepted on this route; use /generate.", param=_MEDIA
        )
    fields = {**parameters, kind: [instance[kind] for instance in body.instances]}
    try:
        return convert(fields, GenerateBody)
    except msgspec.ValidationError as error:
        raise InvalidBody(explain(error, GenerateBody)) from None
