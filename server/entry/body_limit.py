"""Limits a request's body: its type, encoding and size, and the time until it has arrived."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Message, Receive, Scope

from runtime.errors import HeadraceError
from server.dialect import Dialect
from server.entry.origins import is_from_browser
from server.error_responses import (
    BodyTooLarge,
    SlowBody,
    UnsupportedEncoding,
    UnsupportedMediaType,
)
from server.event_stream import ClientGone

BODY_TIMEOUT_S = 120.0


class BodyLimit:
    """Checks the body's headers, and counts its bytes and seconds while it arrives."""

    def __init__(self, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> None:
        """Accept bodies of up to `max_bytes` that arrive within `timeout_s` seconds."""
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    def refusal(self, scope: Scope) -> HeadraceError | None:
        """Return why a body with these headers is refused; None if it is accepted."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
                return self._too_large()
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                return UnsupportedEncoding("Compressed request bodies are not accepted.")
            # Routes of the other APIs check the type themselves, more strictly.
            if name == b"content-type" and scope["route"].dialect is Dialect.NATIVE:
                media_type = value.partition(b";")[0].strip().lower()
                if not _may_be_json(media_type, scope):
                    shown = media_type[:64].decode("ascii", "replace")
                    return UnsupportedMediaType(
                        f"Content-Type {shown!a} is not accepted; send application/json."
                    )
        return None

    def counting(self, receive: Receive) -> Receive:
        """Return a `receive` that raises once the body is too large, too slow or cut off.

        Raises:
            BodyTooLarge, SlowBody, ClientGone: raised by the call of the returned `receive` that
                notices it.
        """
        received = 0
        is_complete = False
        deadline = time.monotonic() + self._timeout_s

        async def counted() -> Message:
            nonlocal received, is_complete
            if is_complete:
                # After the body, a route calls `receive` only to learn that the client has left.
                return await receive()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                text = f"The request body did not arrive within {self._timeout_s:.0f} s."
                raise SlowBody(text) from None
            if message["type"] == "http.disconnect":
                raise ClientGone("The client left before its request was complete.")
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                is_complete = not message.get("more_body", False)
                if received > self._max_bytes:
                    raise self._too_large()
            return message

        return counted

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"The request body is larger than {self._max_bytes} bytes.")


def _may_be_json(media_type: bytes, scope: Scope) -> bool:
    if media_type in (b"", b"application/json") or (
        media_type.startswith(b"application/") and media_type.endswith(b"+json")
    ):
        return True
    # `curl -d` and Python's urllib send this type by default. From a browser it is refused, because
    # a page of another origin may send it without a preflight request.
    return media_type == b"application/x-www-form-urlencoded" and not is_from_browser(scope)
