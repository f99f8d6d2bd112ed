"""Refuses requests from web pages of other origins, which could reach a server on localhost.

It would not be enough to omit CORS headers. A browser sends `text/plain` posts across origins
without a preflight request. The request would run, and the browser would only hide its response
from the page.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import Scope

from runtime.errors import HeadraceError
from server.access import Access
from server.entry.keys import KEY_HEADERS, Keys

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOKUP_TIMEOUT_S = 2.0


class ForeignOrigin(HeadraceError):
    """The request came from a web page of another origin."""

    status_code = 403

    def __init__(self, origin: str) -> None:
        """Write a message that says how to allow `origin`, which is empty if it is unknown."""
        shown = origin[:128] if origin.isprintable() else ascii(origin[:128])
        super().__init__(
            f"A page of another origin ({shown or 'unknown'}) may not do this. Start the server "
            f"with --allow-origins {shown or 'ORIGIN'}, or send a valid API key."
        )


class BrowserRead(HeadraceError):
    """A browser sent GET to an admin route, which may change the server."""

    status_code = 403

    def __init__(self) -> None:
        """Write a message with the method that a page must use."""
        super().__init__("This route may change the server, so a browser must use POST.")


@dataclass(frozen=True, slots=True)
class _Headers:
    """The headers in which a browser tells where a request comes from; empty if absent."""

    origin: str
    host: str
    site: str
    preflight_method: str
    preflight_headers: str


class Origins:
    """Detects requests from pages of other origins, and lets only harmless reads through.

    Origins that the operator lists are allowed. Requests with a valid key are allowed too, because
    a page can have the key only from its user. Both get CORS headers. Pages that this server
    delivered have its own origin and are also allowed.
    """

    def __init__(self, allowed: Sequence[str], keys: Keys) -> None:
        """Allow the origins `allowed` (`*` for any), and requests with one of `keys`."""
        self._allowed = frozenset(allowed)
        self._keys = keys
        self._machine_names: frozenset[str] | None = None

    async def check(self, scope: Scope) -> bool:
        """Check a request; return whether its response should have CORS headers.

        Raises:
            ForeignOrigin: a page of another origin sent the request and is not allowed to.
            BrowserRead: the request would change the server, and may come from a link.
        """
        names = [name for name, _ in scope["headers"]]
        changes_by_reading = (
            scope["method"] == "GET"
            and scope["route"].access is Access.ADMIN
            and is_from_browser(scope)
        )
        if changes_by_reading and not self._keys.exist:
            # A browser may have followed a link, in a mail or on this server's own page, and a link
            # must not change anything.
            raise BrowserRead
        if b"origin" not in names and b"sec-fetch-site" not in names and not changes_by_reading:
            return False
        said = _read(scope)
        if self._is_welcome(scope, said):
            return True
        if not await self._is_harmless(scope, said):
            raise ForeignOrigin(said.origin)
        return False

    def _is_welcome(self, scope: Scope, said: _Headers) -> bool:
        if "*" in self._allowed or said.origin in self._allowed:
            return True
        if said.preflight_method:
            # A preflight request has no key, but lists the headers of the actual request, whose key
            # is checked later.
            announced = {name.strip().lower() for name in said.preflight_headers.split(",")}
            return self._keys.exist and not announced.isdisjoint(KEY_HEADERS)
        return self._keys.has_valid(scope)

    async def _is_harmless(self, scope: Scope, said: _Headers) -> bool:
        if said.origin:
            if await self._is_own_page(said.origin, said.host):
                return True
        elif said.site == "none" or (
            said.site == "same-origin" and await self._is_own_page(f"http://{said.host}", said.host)
        ):
            # A browser sends GET for an image or a link without an origin, but with
            # `Sec-Fetch-Site`.
            return True
        if said.preflight_method:
            return False
        if scope["method"] in _SAFE_METHODS and scope["route"].access is not Access.ADMIN:
            return True
        # If the key is insufficient as well, the refusal says that instead.
        return self._keys.refusal(scope) is not None

    async def _is_own_page(self, origin: str, host: str) -> bool:
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.netloc != host or parts.scheme not in ("http", "https"):
            return False
        # A page's owner may point a domain name at this machine (DNS rebinding), so only addresses
        # and the machine's own names are trusted.
        name = parts.hostname or ""
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            return True
        if name == "localhost":
            return True
        if self._machine_names is None:
            self._machine_names = await machine_names()
        return name in self._machine_names


def is_from_browser(scope: Scope) -> bool:
    """Whether a request has headers that browsers send and that a page cannot remove."""
    for name, value in scope["headers"]:
        if name in (b"origin", b"referer") or name.startswith(b"sec-fetch-"):
            return True
        # Old browsers send none of the headers above.
        if name == b"user-agent" and value.startswith(b"Mozilla/"):
            return True
    return False


async def machine_names() -> frozenset[str]:
    """Return this machine's name and, if it is resolved in time, its full domain name."""
    name = socket.gethostname()
    names = {name}
    with contextlib.suppress(OSError, UnicodeError, TimeoutError):
        async with asyncio.timeout(_LOOKUP_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(name, None, flags=socket.AI_CANONNAME)
        names |= {canonical for _, _, _, canonical, _ in found}
    return frozenset(each.lower() for each in names if each)


def _read(scope: Scope) -> _Headers:
    origin = host = site = method = headers = ""
    for name, value in scope["headers"]:
        if name == b"origin":
            # If there are two such headers, the joined text equals no allowed origin.
            origin += value.decode("latin-1")
        elif name == b"host":
            host = value.decode("latin-1")
        elif name == b"sec-fetch-site":
            site = value.decode("latin-1")
        elif name == b"access-control-request-method" and scope["method"] == "OPTIONS":
            method = value.decode("latin-1")
        elif name == b"access-control-request-headers":
            headers = value.decode("latin-1")
    return _Headers(origin, host, site, method, headers)
