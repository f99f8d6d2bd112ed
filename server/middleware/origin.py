"""Keeps web pages of other origins away from a server that may be open on localhost.

A browser sends `text/plain` posts across origins without asking first, so the absence of CORS
headers protects nothing by itself: the request would run, only its answer would stay unread.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from openai_api.access import Access
from server.errors import json_response

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class OriginMiddleware:
    """Refuses what a page of a foreign origin sends, except plain reading."""

    def __init__(self, app: ASGIApp, allow_origins: Sequence[str]) -> None:
        """Welcome `allow_origins` (`*` for any) and pages that this server itself delivered."""
        self._app = app
        self._allowed = frozenset(allow_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._is_foreign(scope):
            await json_response({"error": "Forbidden"}, 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        origin = host = site = ""
        for name, value in scope["headers"]:
            if name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"host":
                host = value.decode("latin-1")
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1")
        if "*" in self._allowed or (origin and origin in self._allowed):
            return False
        if scope["method"] in _SAFE_METHODS:
            # An image tag can GET without an origin; browsers then say `cross-site`.
            return site == "cross-site" and scope["route"].access is Access.ADMIN
        return bool(origin) and not _is_own_page(origin, host)


def _is_own_page(origin: str, host: str) -> bool:
    parts = urlsplit(origin)
    if parts.netloc != host:
        return False
    # A domain name may have been pointed at this machine by the page's owner; an address not.
    name = parts.hostname or ""
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
