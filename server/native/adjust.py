"""Routes that adjust a running server: options, logging, step delay, garbage collection."""

from __future__ import annotations

import gc
import logging
import math
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Request
from starlette.responses import PlainTextResponse, Response

from runtime.errors import HeadraceError, InvalidRequest
from runtime.eventloop.json_body import read_json
from runtime.ipc.messages import FreezeGarbage, SetLogLevel, SlowDown
from runtime.requests.bounds import within
from runtime.service.context import ServiceContext
from runtime.service.live_options import change_options
from runtime.service.operation import json_of, operation, text
from server.access import Access, AccessRouter
from server.error_responses import json_response
from server.request_log import LEVELS, RequestLog

MAX_SLEEP_S = 60.0


class SetInternalStateBody(msgspec.Struct, kw_only=True):
    """The body of `/set_internal_state`: new values by option name."""

    server_args: dict[str, float]


class SlowDownBody(msgspec.Struct, kw_only=True):
    """The body of `/slow_down`: seconds to sleep before each step; null or 0 for none."""

    forward_sleep_time: Annotated[float, within(0, MAX_SLEEP_S)] | None = None


class ConfigureLoggingBody(msgspec.Struct, kw_only=True):
    """The body of `/configure_logging`; settings whose keys are omitted stay as they are."""

    log_requests: bool | None = None
    log_requests_level: Annotated[int, within(LEVELS[0], LEVELS[-1])] | None = None
    log_requests_format: Literal["text", "json"] | None = None
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    # SGLang's options that write users' prompts to files, which this server does not support.
    dump_requests_folder: str | None = None
    dump_requests_threshold: int | None = None
    crash_dump_folder: str | None = None


_STATE = msgspec.json.Decoder(SetInternalStateBody)
_SLOW_DOWN = msgspec.json.Decoder(SlowDownBody)
_LOGGING = msgspec.json.Decoder(ConfigureLoggingBody)


class WorkerRefused(HeadraceError):
    """The worker could not execute a command."""

    status_code = 500


def create_router(context: ServiceContext, request_log: RequestLog) -> AccessRouter:
    """Create the router of the routes that adjust a running server."""
    router = AccessRouter(Access.ADMIN, tags=["control"])

    async def tell(make: Any) -> None:
        reply = await context.client.calls.control(make)
        if not reply.success:
            raise WorkerRefused(reply.message)

    async def set_internal_state(request: Request) -> Response:
        """Change options of the running scheduler; return true if all options were changed."""
        body = await read_json(await request.body(), _STATE)
        return json_response([await change_options(context, body.server_args)])

    documented = operation(SetInternalStateBody, ok=json_of(list[bool]))
    router.add_api_route(
        "/set_internal_state", set_internal_state, methods=["POST", "PUT"], openapi_extra=documented
    )

    @router.post(
        "/slow_down",
        openapi_extra=operation(SlowDownBody, ok=json_of(None), body_may_be_absent=True),
    )
    async def slow_down(request: Request) -> Response:
        """Sleep before each step, to simulate the effects of a high load."""
        payload = await request.body()
        body = await read_json(payload, _SLOW_DOWN) if payload else SlowDownBody()
        seconds = body.forward_sleep_time or 0.0
        if not (math.isfinite(seconds) and 0.0 <= seconds <= MAX_SLEEP_S):
            raise InvalidRequest(
                f"forward_sleep_time must be in [0, {MAX_SLEEP_S:.0f}] seconds, got {seconds}.",
                param="forward_sleep_time",
            )
        await tell(lambda call_id: SlowDown(call_id, seconds))
        return json_response(None)

    @router.post("/freeze_gc", openapi_extra=operation(ok=text(), refuses=(503,)))
    async def freeze_gc() -> Response:
        """Exclude current objects from later garbage collections, here and in the worker."""
        gc.collect()
        gc.freeze()
        await tell(FreezeGarbage)
        return PlainTextResponse("Garbage collection frozen.\n")

    @router.post(
        "/configure_logging",
        openapi_extra=operation(ConfigureLoggingBody, body_may_be_absent=True),
    )
    async def configure_logging(request: Request) -> Response:
        """Change what is logged about requests, and the log level of the server and its worker."""
        payload = await request.body()
        body = await read_json(payload, _LOGGING) if payload else ConfigureLoggingBody()
        for name in ("dump_requests_folder", "dump_requests_threshold", "crash_dump_folder"):
            if getattr(body, name):
                raise InvalidRequest(
                    f"{name} is not supported: log_requests_level 3 logs whole requests.",
                    param=name,
                )
        level = body.log_requests_level
        if level is not None and level not in LEVELS:
            raise InvalidRequest(
                f"log_requests_level must be in [{LEVELS[0]}, {LEVELS[-1]}], got {level}.",
                param="log_requests_level",
            )
        log_level = body.log_level
        if log_level is not None:
            await tell(lambda call_id: SetLogLevel(call_id, log_level))
            logging.getLogger().setLevel(log_level.upper())
        request_log.change(is_on=body.log_requests, level=level, form=body.log_requests_format)
        return Response(status_code=200)

    return router
