"""What the server is: the model, the arguments, the state."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from server.context import ServerContext
from server.errors import json_response
from server.native.describe import describe_model, describe_server

logger = logging.getLogger(__name__)


def create_router(context: ServerContext) -> APIRouter:
    """Model and server information."""
    router = APIRouter(tags=["native"])

    async def model_info() -> Response:
        """The model: exactly nine keys, which clients compare."""
        return json_response(describe_model(context))

    async def server_info() -> Response:
        """Every argument with its resolved value, and the engine's state."""
        return json_response(describe_server(context))

    old_names_seen: set[str] = set()

    async def note_old_name(request: Request) -> None:
        # Once each: routers and trainers ask all the time.
        path = request.scope["route"].path
        if path not in old_names_seen:
            old_names_seen.add(path)
            logger.warning(
                "GET %s is deprecated; it works as ever, and %s is its name now.",
                path,
                path.replace("/get_", "/"),
            )

    for name, handler in (("model_info", model_info), ("server_info", server_info)):
        router.add_api_route(f"/{name}", handler, methods=["GET"])
        router.add_api_route(
            f"/get_{name}", handler, methods=["GET"], dependencies=[Depends(note_old_name)]
        )

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
