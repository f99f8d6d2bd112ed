"""`/flush_cache`: drops the prefix cache."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Annotated

from fastapi import Request
from starlette.responses import Response

from runtime.errors import InvalidRequest
from runtime.requests.bounds import within
from runtime.service.context import ServiceContext
from runtime.service.operation import Query, operation, text
from server.access import Access, AccessRouter

MAX_FLUSH_WAIT_S = 300.0
_FLUSH_POLL_S = 0.1


_QUERY = (
    Query(
        "timeout",
        Annotated[float, within(0, MAX_FLUSH_WAIT_S)],
        "Seconds to wait for running requests.",
    ),
)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of `/flush_cache`."""
    router = AccessRouter(Access.ADMIN, tags=["control"])

    async def flush_cache(request: Request) -> Response:
        """Drop the prefix cache; 400 if requests still run or wait after `timeout` seconds."""
        deadline = time.monotonic() + _wait_s(request)
        while True:
            reply = await context.client.calls.flush_cache()
            if reply.success:
                return Response("Cache flushed.\n", media_type="text/plain")
            if time.monotonic() >= deadline:
                text = (
                    reply.message or "The cache was not flushed: requests are running or waiting."
                )
                return Response(f"{text}\n", 400, media_type="text/plain")
            await asyncio.sleep(_FLUSH_POLL_S)

    methods = ["POST"]
    # Trainers call this route with GET. That is allowed only without keys, like GET on other routes
    # that change the server.
    if context.config.http.api_key is None and context.config.http.admin_api_key is None:
        methods.append("GET")
    documented = operation(ok=text(), others={400: text()}, refuses=(400, 503), query=_QUERY)
    router.add_api_route("/flush_cache", flush_cache, methods=methods, openapi_extra=documented)

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
