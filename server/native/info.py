"""What the server is: the model, the arguments, the state."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response

from openai_api.access import Access, AccessRouter
from runtime.service.context import ServiceContext
from runtime.service.describe import describe_model, describe_server
from server.error_responses import json_response

logger = logging.getLogger(__name__)


def create_router(context: ServiceContext) -> AccessRouter:
    """Model and server information."""
    router = AccessRouter(Access.KEY, tags=["native"])

    async def model_info() -> Response:
        """The model: exactly nine keys, which clients compare."""
        return json_response(describe_model(context))

    async def server_info() -> Response:
        """Every argument with its resolved value, and the engine's state."""
        return json_response(describe_server(context))

    for name, handler in (("model_info", model_info), ("server_info", server_info)):
        router.add_api_route(f"/{name}", handler, methods=["GET"])
        old = _under_old_name(name, handler)
        router.add_api_route(f"/get_{name}", old, methods=["GET"], name=name)

    async def root() -> Response:
        """Where to look next."""
        return json_response(
            {
                "name": "headrace",
                "version": context.version,
                "model": context.config.model.served_model_name,
                "docs": None if context.config.http.disable_docs else "/docs",
                "openai": "/v1",
                "health": "/health",
            }
        )

    router.add_api_route("/", root, methods=["GET"])
    router.add_api_route("/", root, methods=["HEAD"], include_in_schema=False)
    return router


def _under_old_name(
    name: str, handler: Callable[[], Awaitable[Response]]
) -> Callable[[], Awaitable[Response]]:
    was_noted = False

    async def answer() -> Response:
        nonlocal was_noted
        # Once each: routers and trainers ask all the time.
        if not was_noted:
            was_noted = True
            logger.warning(
                "GET /get_%s is deprecated; it works as ever, and /%s is its name now.", name, name
            )
        return await handler()

    answer.__doc__ = handler.__doc__
    return answer
