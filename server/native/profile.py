"""`/start_profile` and `/stop_profile`: profile the worker's steps, with traces for Perfetto."""

from __future__ import annotations

import msgspec
from fastapi import Request
from starlette.responses import PlainTextResponse, Response

from runtime.eventloop.json_body import read_json
from runtime.service.context import ServiceContext
from runtime.service.operation import operation, text
from runtime.service.profiling import ProfileBody, start_profile, stop_profile
from server.access import Access, AccessRouter

_DECODER = msgspec.json.Decoder(ProfileBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of both routes."""
    router = AccessRouter(Access.ADMIN, tags=["control"])

    async def start(request: Request) -> Response:
        """Record the worker's next steps; with `num_steps` the trace is written automatically."""
        payload = await request.body()
        body = await read_json(payload, _DECODER) if payload else ProfileBody()
        text = await start_profile(context, body)
        return PlainTextResponse(f"{text}\n")

    async def stop() -> Response:
        """Write the recorded trace; 400 if recording is off."""
        return PlainTextResponse(f"{await stop_profile(context.client)}\n")

    methods = ["POST"]
    # SGLang's clients send GET. That is allowed only without keys, like GET on other routes that
    # change the server.
    if context.config.http.api_key is None and context.config.http.admin_api_key is None:
        methods.append("GET")
    starting = operation(ProfileBody, ok=text(), refuses=(400, 503), body_may_be_absent=True)
    router.add_api_route("/start_profile", start, methods=methods, openapi_extra=starting)
    stopping = operation(ok=text(), refuses=(400, 503))
    router.add_api_route("/stop_profile", stop, methods=methods, openapi_extra=stopping)
    return router
