"""Routes that change something: drop the prefix cache, abort requests."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Annotated

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.operation import Query, operation, text
from runtime.client.json_body import read_json
from runtime.errors import InvalidRequest
from runtime.requests.bounds import within
from runtime.service.context import ServiceContext
from server.access import Access, AccessRouter

MAX_FLUSH_WAIT_S = 300.0
_FLUSH_POLL_S = 0.1


class AbortBody(msgspec.Struct, kw_only=True):
    """`/abort_request` as it arrives."""

    rid: str | None = None
    abort_all: bool | None = None


_QUERY = (
    Query(
        "timeout",
        Annotated[float, within(0, MAX_FLUSH_WAIT_S)],
        "Seconds to wait for running requests.",
    ),
)
_ABORT = msgspec.json.Decoder(AbortBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Cache and abort."""
    router = AccessRouter(Access.ADMIN, tags=["control"])

    async def flush_cache(request: Request) -> Response:
        """Drop the prefix cache; 400 when requests still run or wait after `timeout` seconds."""
        deadline = time.monotonic() + _wait_s(request)
        while True:
            reply = await context.client.flush_cache()
            if reply.success:
                return Response("Cache flushed.\n", media_type="text/plain")
            if time.monotonic() >= deadline:
                text = (
                    reply.message or "The cache was not flushed: requests are running or waiting."
                )
                return Response(f"{text}\n", 400, media_type="text/plain")
            await asyncio.sleep(_FLUSH_POLL_S)

    methods = ["POST"]
    # Trainers poll it with GET; with a key set, nothing that changes the server answers GET.
    if context.config.http.api_key is None and context.config.http.admin_api_key is None:
        methods.append("GET")
    documented = operation(ok=text(), others={400: text()}, refuses=(400, 503), query=_QUERY)
    router.add_api_route("/flush_cache", flush_cache, methods=methods, openapi_extra=documented)

    @router.post("/abort_request", openapi_extra=operation(AbortBody, body_may_be_absent=True))
    async def abort_request(request: Request) -> Response:
        """Abort one request (or the batch it names) or all; each still gets its final answer."""
        payload = await request.body()
        body = await read_json(payload, _ABORT) if payload else AbortBody()
        if body.abort_all:
            context.client.abort_all()
        elif body.rid:
            context.client.abort(body.rid)
        return Response(status_code=200)

    return router


def _wait_s(request: Request) -> float:
    text = request.query_params.get("timeout") or "0"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_FLUSH_WAIT_S:
        raise InvalidRequest(
            f"timeout must be in [0, {MAX_FLUSH_WAIT_S:.0f}] seconds.", param="timeout"
        )
    return seconds
