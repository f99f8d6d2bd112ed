"""`/open_session` and `/close_session`; a request joins a session by its `session_params`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import Request
from starlette.responses import Response

from runtime.client.session_store import MAX_ID_CHARS, MAX_TIMEOUT_S
from runtime.eventloop.json_body import read_json
from runtime.requests.bounds import at_most, within
from runtime.service.context import ServiceContext
from runtime.service.operation import json_of, operation
from server.access import Access, AccessRouter
from server.error_responses import json_response


class OpenBody(msgspec.Struct, kw_only=True):
    """The body of `/open_session`. A session closes after `timeout` seconds without a request."""

    capacity_of_str_len: Annotated[int, within(1)]
    session_id: Annotated[str, at_most(chars=MAX_ID_CHARS)] | None = None
    streaming: bool | None = None
    timeout: Annotated[float, within(above=0, high=MAX_TIMEOUT_S)] | None = None


class CloseBody(msgspec.Struct, kw_only=True):
    """The body of `/close_session`."""

    session_id: str


_OPEN = msgspec.json.Decoder(OpenBody)
_CLOSE = msgspec.json.Decoder(CloseBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of both routes."""
    router = AccessRouter(Access.KEY, tags=["native"])

    @router.post("/open_session", openapi_extra=operation(OpenBody, ok=json_of(str)))
    async def open_session(request: Request) -> Response:
        """Open a session and return its id."""
        body = await read_json(await request.body(), _OPEN)
        session_id = context.sessions.open(
            body.capacity_of_str_len,
            body.session_id,
            streaming=bool(body.streaming),
            timeout_s=body.timeout,
        )
        return json_response(session_id)

    @router.post("/close_session", openapi_extra=operation(CloseBody, refuses=(404,)))
    async def close_session(request: Request) -> Response:
        """Close a session. An unknown session is a 404 with `--api-keys-file`, else no error."""
        context.sessions.close((await read_json(await request.body(), _CLOSE)).session_id)
        return Response(status_code=200)

    return router
