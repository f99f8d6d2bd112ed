"""Reading a request's body: media type, then strict JSON into typed fields."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from starlette.requests import Request

from runtime.client.expected import InvalidBody
from runtime.client.json_body import read_json
from runtime.errors import InvalidRequest

T = TypeVar("T")

_JOINED_BYTES = 2**20
_MISSING = re.compile(r"missing required field `(\w+)`")


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


async def read_body(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Decode the whole body.

    Raises:
        InvalidRequest: not JSON, or a field of the wrong type; the message names the field.
    """
    check_media_type(request)
    try:
        return await read_json(await read_raw(request), decoder)
    except InvalidBody as error:
        missing = _MISSING.search(error.message)
        if error.param is None and missing is not None:
            error.param = missing[1]
        raise
