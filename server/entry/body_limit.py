"""Limits on a request's body: its type, size and encoding, and the time it may take to arrive."""

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
    """Counts the body as it streams in; a route never receives more than the limit."""

    def __init__(self, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> None:
        """Accept bodies of up to `max_bytes`, sent within `timeout_s`."""
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    def refusal(self, scope: Scope) -> HeadraceError | None:
        """Why the body that the headers announce is refused; None if it is accepted."""
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_bytes:
                return self._too_large()
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                return UnsupportedEncoding("Compressed request bodies are not accepted.")
            # The routes of other dialects have their own, stricter rule.
            if name == b"content-type" and scope["route"].dialect is Dialect.NATIVE:
                media_type = value.partition(b";")[0].strip().lower()
                if not _may_be_json(media_type, scope):
                    shown = media_type[:64].decode("ascii", "replace")
                    return UnsupportedMediaType(
                        f"Content-Type {shown!a} is not accepted; send application/json."
                    )
        return None

    def counting(self, receive: Receive) -> Receive:
        """Wrap `receive` so that it raises once the body is too large, too slow or cut off.

        Raises:
            BodyTooLarge, SlowBody, ClientGone: raised by the call of `receive` that detects the
                problem.
        """
        received = 0
        is_complete = False
        deadline = time.monotonic() + self._timeout_s

        async def counted() -> Message:
            nonlocal received, is_complete
            if is_complete:
                # From here on a route only waits for the client to disconnect.
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
    # The default of `curl -d` and of Python's urllib. A page may also use this type, and does so
    # without a preflight request.
    return media_type == b"application/x-www-form-urlencoded" and not is_from_browser(scope)
