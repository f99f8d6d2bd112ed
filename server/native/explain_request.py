"""`/explain_request`: tells where each millisecond of a request went, and what it waited for."""

from __future__ import annotations

from typing import TypedDict

import msgspec
from fastapi import Request
from starlette.responses import Response

from runtime.eventloop.json_body import read_json
from runtime.service.context import ServiceContext
from runtime.service.explain_request import Explained, explain_request
from runtime.service.operation import json_of, operation
from server.access import Access, AccessRouter
from server.error_responses import json_response
from server.request_body import read_raw


class ExplainRequestBody(msgspec.Struct, kw_only=True):
    """The body of `/explain_request`.

    Attributes:
        id: a request's or batch's `rid`, an answer's `id`, or the `x-request-id` of a response.
    """

    id: str


class RequestsExplained(TypedDict):
    """The explanations of the request's samples, in order; most requests have one sample."""

    requests: list[Explained]


_DECODER = msgspec.json.Decoder(ExplainRequestBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router. The method is POST: browsers may not send GET to admin routes."""
    router = AccessRouter(Access.ADMIN, tags=["native"], serves_tenants=True)
    documented = operation(ExplainRequestBody, ok=json_of(RequestsExplained), refuses=(404,))

    @router.post("/explain_request", openapi_extra=documented)
    async def explain(request: Request) -> Response:
        """Tell where each millisecond of one of the last 10,000 requests went."""
        asked = await read_json(await read_raw(request), _DECODER)
        return json_response({"requests": await explain_request(context, asked.id)})

    return router
