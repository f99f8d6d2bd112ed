"""Routes that record which experts a mixture-of-experts model routes tokens to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from starlette.responses import PlainTextResponse, Response

from runtime.service.context import ServiceContext
from runtime.service.expert_records import record_experts
from runtime.service.operation import operation, text
from server.access import Access, AccessRouter

_ACTIONS: tuple[Literal["start", "stop", "dump"], ...] = ("start", "stop", "dump")


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of the routes that start, stop and write the record."""
    router = AccessRouter(Access.ADMIN, tags=["control"])
    for action in _ACTIONS:
        path = f"/{action}_expert_distribution_record"
        documented = operation(ok=text(), refuses=(503,))
        router.add_api_route(
            path, _handler(context, action), methods=["POST"], openapi_extra=documented
        )
    return router


def _handler(
    context: ServiceContext, action: Literal["start", "stop", "dump"]
) -> Callable[[], Awaitable[Response]]:
    async def handle() -> Response:
        """Start recording which experts are used, stop it, or write the record to a file."""
        return PlainTextResponse(f"{await record_experts(context.client, action)}\n")

    return handle
