"""Reads a request's body: checks its media type, and collects its bytes."""

from __future__ import annotations

from starlette.requests import Request

from runtime.errors import InvalidRequest
from runtime.requests.arrival import timed

_JOINED_BYTES = 2**20


def check_media_type(request: Request) -> None:
    """Refuse a body whose `Content-Type` is not JSON, such as that of a form in a web page.

    Raises:
        InvalidRequest: the media type is missing or another one.
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
    """Return the whole body.

    A large body grows in place, because joining its parts at the end would block the event loop
    while they are copied.
    """
    with timed("body"):
        return await _read_all(request)


async def _read_all(request: Request) -> bytes | bytearray:
    message = await request.receive()
    part: bytes = message.get("body", b"")
    if not message.get("more_body", False) and len(part) <= _JOINED_BYTES:
        # A small body arrives together with its head, with rare exceptions.
        return part
    body = bytearray(part)
    while message.get("more_body", False):
        message = await request.receive()
        body += message.get("body", b"")
    return body if len(body) > _JOINED_BYTES else bytes(body)
