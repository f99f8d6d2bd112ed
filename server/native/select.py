"""`/v1/select`: returns the log-probabilities of several continuations of a prompt."""

from __future__ import annotations

import msgspec
from fastapi import Request
from starlette.responses import Response

from runtime.eventloop.json_body import read_json
from runtime.eventloop.json_pieces import JsonList
from runtime.service.choices import Choices, SelectBody, select
from runtime.service.context import ServiceContext
from runtime.service.operation import json_of, operation
from server.access import Access, AccessRouter
from server.event_stream import json_answer, unless_disconnected
from server.request_body import check_media_type, read_raw

_DECODER = msgspec.json.Decoder(SelectBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of `/v1/select`."""
    router = AccessRouter(Access.KEY, tags=["native"])

    @router.post("/v1/select", openapi_extra=operation(SelectBody, ok=json_of(Choices)))
    async def select_choices(request: Request) -> Response:
        """Return the log-probabilities of each choice's tokens as a continuation of the prompt."""
        check_media_type(request)
        raw = await read_raw(request)
        body = await read_json(raw, _DECODER)
        found = await unless_disconnected(request.receive, select(context, body, len(raw)))
        num_numbers = 3 * sum(len(each["token_logprobs"]) for each in found["choices"])
        return json_answer({**found, "choices": JsonList(num_numbers, found["choices"])})

    return router
