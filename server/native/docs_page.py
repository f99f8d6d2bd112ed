"""`/docs`: a page that shows `/openapi.json` and sends requests, without files of other hosts."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from starlette.responses import Response

from server.access import Access, AccessRouter

_SCRIPT_BEGIN, _SCRIPT_END = "<script>", "</script>"


def create_router() -> AccessRouter:
    """Create the router of the page."""
    router = AccessRouter(Access.KEY, include_in_schema=False)
    page = files("server.native").joinpath("docs_page.html").read_text(encoding="utf-8")
    headers = {"content-security-policy": _policy(page)}

    @router.get("/docs")
    async def docs() -> Response:
        """A page that lists all routes with their inputs and outputs."""
        return Response(page, media_type="text/html", headers=headers)

    return router


def _policy(page: str) -> str:
    """Return a content security policy that allows only this server and the page's own script."""
    script = page.partition(_SCRIPT_BEGIN)[2].partition(_SCRIPT_END)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        f"frame-ancestors 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )
