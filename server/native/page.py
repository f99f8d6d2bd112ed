"""The page for people at `/`: static files in `server/page`, which load no files of other hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import Request
from starlette.responses import Response

from runtime.config.options import HttpArgs
from server.access import Access, AccessRouter

INDEX = "index.html"
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# `data:` allows images that a person attaches. Trusted types forbid turning a string into markup,
# so even with a mistake in the page, a model's text cannot become markup.
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The browser asks each time, because a new server version has other files of the same names.
    "cache-control": "no-cache",
    "vary": "accept",
}


def create_router(http: HttpArgs) -> AccessRouter:
    """Create the router of the page's files. For browsers, `RouteTable` shows the index at `/`.

    The files need no key: they are not secret, and the page itself asks a person for the key.
    """
    router = AccessRouter(Access.OPEN, include_in_schema=False)
    for file in files("server").joinpath("page").iterdir():
        suffix = file.name.rpartition(".")[2]
        if suffix not in _TYPES:
            continue
        data = file.read_bytes()
        if file.name == INDEX and http.api_key:
            # The page then asks for the key at once, not only after a refused request.
            data = data.replace(b"<html ", b'<html data-key="needed" ', 1)
        if file.name == INDEX and http.admin_api_key:
            # The page then asks for the admin key when a person clicks on what needs it.
            data = data.replace(b"<html ", b'<html data-admin="apart" ', 1)
        router.add_api_route(f"/page/{file.name}", _file(data, _TYPES[suffix]), methods=["GET"])
    return router


def _file(data: bytes, content_type: str) -> Callable[[Request], Awaitable[Response]]:
    tag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    headers = {**_HEADERS, "etag": tag}

    async def send_file(request: Request) -> Response:
        """Return a file of the page, or 304 if the browser has the same version."""
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=content_type, headers=headers)

    return send_file
