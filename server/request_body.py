"""Reading a request's body: its media type, then all of its bytes."""

from __future__ import annotations

from starlette.requests import Request

from runtime.errors import InvalidRequest

_JOINED_BYTES = 2**20


def check_media_type(request: Request) -> None:
    """Refuse a body that is not declared as JSON: a browser's form cannot reach these routes.

    Raises:
        InvalidRequest: another media type, or none.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest("The Content-Type header must be application/json.")


async def read_raw(request: Request) -> bytes | bytearray:
    """The whole body.

    A large one grows in place: to join its parts in the end would hold the event loop for as long
    as it takes to copy it.
    """
    for name, value in request.scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) <= _JOINED_BYTES:
            return await request.body()
    body = bytearray()
    async for part in request.stream():
        body += part
    return body if len(body) > _JOINED_BYTES else bytes(body)
