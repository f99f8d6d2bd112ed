"""Routes that describe the server: the model, the options and the state."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypedDict

from starlette.responses import Response

from openai_api.openai_context import OpenAIContext
from runtime.service.describe import ModelInfo, ServerInfo, describe_model, describe_server
from runtime.service.operation import json_of, operation
from server.access import Access, AccessRouter
from server.error_responses import json_response

logger = logging.getLogger(__name__)


class Root(TypedDict):
    """The answer of `/`: the model, and the paths of other routes."""

    name: str
    version: str
    model: str | None
    docs: str | None
    openai: str
    health: str


def create_router(openai: OpenAIContext) -> AccessRouter:
    """Create the router of the routes that describe model and server."""
    context, parsers = openai.service, openai.parser_names.as_options
    router = AccessRouter(Access.KEY, tags=["native"])

    async def model_info() -> Response:
        """Describe the model, with exactly nine keys, because clients compare them."""
        return json_response(describe_model(context))

    async def server_info() -> Response:
        """Return every option with its resolved value, and the state of the engine."""
        return json_response(describe_server(context, parsers))

    for name, handler, kind in (
        ("model_info", model_info, ModelInfo),
        ("server_info", server_info, ServerInfo),
    ):
        documented = operation(ok=json_of(kind))
        router.add_api_route(f"/{name}", handler, methods=["GET"], openapi_extra=documented)
        old = _under_old_name(name, handler)
        router.add_api_route(
            f"/get_{name}",
            old,
            methods=["GET"],
            name=name,
            openapi_extra=documented,
            deprecated=True,
        )

    async def root() -> Response:
        """Return the model's name, and the paths of other routes."""
        return json_response(
            {
                "name": "headrace",
                "version": context.version,
                "model": context.served_model_name,
                "docs": None if context.config.http.disable_docs else "/docs",
                "openai": "/v1",
                "health": "/health",
            },
            # The answer depends on `Accept`: browsers get a page here.
            vary="accept",
        )

    router.add_api_route("/", root, methods=["GET"], openapi_extra=operation(ok=json_of(Root)))
    return router


def _under_old_name(
    name: str, handler: Callable[[], Awaitable[Response]]
) -> Callable[[], Awaitable[Response]]:
    was_noted = False

    async def answer() -> Response:
        nonlocal was_noted
        # The warning is logged once for each name, because routers and trainers poll these routes.
        if not was_noted:
            was_noted = True
            logger.warning(
                "GET /get_%s is deprecated but still works; use /%s instead.", name, name
            )
        return await handler()

    answer.__doc__ = handler.__doc__
    return answer
