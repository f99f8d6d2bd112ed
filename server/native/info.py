"""What the server is: the model, the arguments, the state."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from server.context import ServerContext
from server.errors import json_response
from server.native.describe import describe_model, describe_server


def create_router(context: ServerContext) -> APIRouter:
    """Model and server information."""
    router = APIRouter(tags=["native"])

    async def model_info() -> Response:
        """The model: exactly nine keys, which clients compare."""
        return json_response(describe_model(context))

    async def server_info() -> Response:
        """Every argument with its resolved value, and the engine's state."""
        return json_response(describe_server(context))

    for path in ("/get_model_info", "/model_info"):
        router.add_api_route(path, model_info, methods=["GET"])
    for path in ("/get_server_info", "/server_info"):
        router.add_api_route(path, server_info, methods=["GET"])

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
