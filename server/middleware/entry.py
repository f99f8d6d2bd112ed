"""The outermost layer: request ids, the access log, HTTP counters, errors nobody else caught."""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from openai_api.access import Access
from runtime.service.context import Lifecycle
from server.error_responses import error_response
from server.routing import RouteMatch

access_logger = logging.getLogger("server.access")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_UNPRINTABLE = re.compile(r"[^!-~]")
MAX_LOGGED_PATH = 128
# What an error says and how many characters of it are shown; it may repeat a little of the request.
_LOGGED_REASON = re.compile(rb'"message":"((?:[^"\\]|\\.)+)')
_MAX_REASON = 160
# Routes with keys that are asked every second or so, as the open ones are.
_POLLED_ROUTES = frozenset({"/v1/loads", "/get_load", "/ping"})


class HttpObserver(Protocol):
    """Counts requests as they come and go."""

    def on_request(self) -> None:
        """A request began."""

    def on_response(self, scope: Scope, status_code: int) -> None:
        """A request ended, with this status (499 when the client left before any)."""


class EntryMiddleware:
    """Wraps the whole application, every refusal of the other middlewares included."""

    def __init__(self, app: ASGIApp, lifecycle: Lifecycle, observers: list[HttpObserver]) -> None:
        """Close connections once `lifecycle` drains; tell `observers` about each request."""
        self._app = app
        self._lifecycle = lifecycle
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id.decode("ascii")
        started_at = time.perf_counter()
        status_code = 0
        reason = ""

        async def send_with_id(message: Message) -> None:
            nonlocal status_code, reason
            if message["type"] == "http.response.start":
                status_code = message["status"]
                headers = list(message.get("headers", ()))
                headers.append((b"x-request-id", request_id))
                if self._lifecycle.draining:
                    # The next request of this client must find another server.
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            elif status_code >= 400 and (found := _LOGGED_REASON.search(message.get("body", b""))):
                reason = " " + _UNPRINTABLE.sub(
                    " ", found[1][:_MAX_REASON].decode("ascii", "replace")
                )
            await send(message)

        for observer in self._observers:
            observer.on_request()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if status_code == 0:
                speaks_openai = scope["route"].speaks_openai
                response = error_response(error, speaks_openai=speaks_openai)
                await response(scope, receive, send_with_id)
            else:
                access_logger.exception("A response broke off")
        finally:
            for observer in self._observers:
                observer.on_response(scope, status_code or 499)
            _log(scope, status_code or 499, time.perf_counter() - started_at, reason)


def _request_id(scope: Scope) -> bytes:
    sent = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(sent) == 1 and _REQUEST_ID.fullmatch(sent[0]):
        return bytes(sent[0])
    return secrets.token_hex(16).encode()


def _log(scope: Scope, status_code: int, seconds: float, reason: str) -> None:
    route: RouteMatch = scope["route"]
    is_open = route.access is Access.OPEN and route.path is not None
    is_polled = is_open or route.path in _POLLED_ROUTES
    # At the usual level probes and routers would drown the rest.
    level = logging.DEBUG if is_polled else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    client = scope.get("client")
    path = _UNPRINTABLE.sub("?", scope["path"][:MAX_LOGGED_PATH])
    access_logger.log(
        level,
        "%s %s %s %d %.1f ms id=%s%s",
        client[0] if client else "-",
        scope["method"],
        path,
        status_code,
        1000 * seconds,
        scope["state"]["request_id"],
        reason,
    )
