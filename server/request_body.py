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
    for name, value in request.scope["headers"]:
        if name == b"content-type":
            is_json = value.partition(b";")[0].strip().lower() == b"application/json"
            break
    else:
        is_json = False
    if not is_json:
        raise InvalidRequest("The Content-Type header must be application/json.")


async def read_raw(request: Request) -> bytes | bytearray:
    """The whole body.

    A large one grows in place: to join its parts in the end would hold the event loop for as long
    as it takes to copy it.
    """
    message = await request.receive()
    part: bytes = message.get("body", b"")
    if not message.get("more_body", False) and len(part) <= _JOINED_BYTES:
        # As good as always it has come with its head.
        return part
    body = bytearray(part)
    while message.get("more_body", False):
        message = await request.receive()
        body += message.get("body", b"")
    return body if len(body) > _JOINED_BYTES else bytes(body)
