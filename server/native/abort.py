"""`/abort_request`: aborts one request by its `rid`, or all requests."""

from __future__ import annotations

import msgspec
from fastapi import Request
from starlette.responses import Response

from runtime.client.tenant import TENANT
from runtime.errors import HeadraceError
from runtime.eventloop.json_body import read_json
from runtime.service.context import ServiceContext
from runtime.service.operation import operation
from server.access import Access, AccessRouter
from server.error_responses import KeyRefused


class UnknownRid(HeadraceError):
    """No running request of the tenant has this `rid`; another tenant's may."""

    status_code = 404


class AbortBody(msgspec.Struct, kw_only=True):
    """The body of `/abort_request`."""

    rid: str | None = None
    abort_all: bool | None = None


_ABORT = msgspec.json.Decoder(AbortBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of `/abort_request`."""
    router = AccessRouter(Access.ADMIN, tags=["control"], serves_tenants=True)

    documented = operation(AbortBody, body_may_be_absent=True, refuses=(404,))

    @router.post("/abort_request", openapi_extra=documented)
    async def abort_request(request: Request) -> Response:
        """Abort the request or batch `rid`, or all requests; each still gets its final answer."""
        payload = await request.body()
        body = await read_json(payload, _ABORT) if payload else AbortBody()
        is_tenant = bool(TENANT.get())
        if body.abort_all:
            if is_tenant:
                raise KeyRefused(is_known=True)
            context.client.abort_all()
        elif body.rid:
            num_found = context.client.abort(body.rid, of_all_tenants=not is_tenant)
            if is_tenant and not num_found:
                raise UnknownRid(f"No request {body.rid[:64]!r} is in flight.")
        return Response(status_code=200)

    return router
