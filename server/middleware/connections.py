"""Connections over the limit: probes are answered on them, and nothing else."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from openai_api.access import Access
from runtime.errors import Overloaded
from server.error_responses import error_response


class ConnectionsMiddleware:
    """Refuses a request whose connection is one too many, unless it is a probe's."""

    def __init__(self, app: ASGIApp) -> None:
        """Stand before `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = scope["route"]
        is_probe = route.access is Access.OPEN and route.path is not None
        if is_probe or not scope.get("state", {}).get("is_spare_connection"):
            await self._app(scope, receive, send)
            return
        error = Overloaded("Too many connections are open (--max-connections).")
        await error_response(error, speaks_openai=route.speaks_openai)(scope, receive, send)
