"""Routes of embedding, reward and rerank models, which a generation model answers with a reason."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.responses import Response

from openai_api.operation import operation
from runtime.errors import InvalidRequest
from runtime.service.context import ServiceContext
from server.access import Access, AccessRouter

_NEEDS = {
    "/classify": "a reward or classification model",
    "/v1/classify": "a classification model",
    "/v1/rerank": "a rerank model",
}


def create_router(context: ServiceContext) -> AccessRouter:
    """Refusals in place of 404, which would tell a client that it mistyped the path."""
    router = AccessRouter(Access.KEY, tags=["native"])
    for path, needed in _NEEDS.items():
        router.add_api_route(
            path,
            _refusal(context, path, needed),
            methods=["POST", "PUT"],
            openapi_extra=operation(ok=None),
        )
    return router


def _refusal(context: ServiceContext, path: str, needed: str) -> Callable[[], Awaitable[Response]]:
    architecture = context.model.architecture

    async def refuse() -> Response:
        """Refused: it needs a kind of model that this server does not run yet."""
        raise InvalidRequest(
            f"This server's model ({architecture}) is not {needed}, which {path} needs; those are "
            "not supported yet."
        )

    return refuse
