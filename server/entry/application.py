"""The ASGI application: the path of every request from uvicorn to its route and back.

It gives the request an id, checks it, sends the response or refusal, counts and logs it.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Protocol

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.client.tenant import TENANT
from runtime.config.options import HttpArgs
from runtime.eventloop.ignored_fields import HEADER, IGNORED, IgnoredFields
from runtime.requests.arrival import ARRIVAL, Arrival
from runtime.requests.random_hex import random_hex
from runtime.requests.request_context import REQUEST, RequestContext
from runtime.service.context import Lifecycle
from server.access import Access
from server.entry.body_limit import BodyLimit
from server.entry.connections import check_connection
from server.entry.keys import Keys
from server.entry.last_errors import LastErrors
from server.entry.origins import Origins
from server.error_responses import error_response
from server.routing import RouteMatch, RouteTable
from server.tracing import Tracing, trace_response

access_logger = logging.getLogger("server.access")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_UNPRINTABLE = re.compile(r"[^!-~]")
MAX_LOGGED_PATH = 128
# The part of an error response that the access log shows, of at most `_MAX_REASON` characters. It
# may repeat a part of the request.
_LOGGED_REASON = re.compile(rb'"message":"((?:[^"\\]|\\.)+)')
_MAX_REASON = 160
# Routes that need a key and are polled about every second, as open routes are.
_POLLED_ROUTES = frozenset({"/v1/loads", "/get_load", "/ping", "/last_errors"})


class HttpObserver(Protocol):
    """Counts requests, and measures the lag of the event loop that serves them."""

    async def measure_loop(self) -> None:
        """Measure the running event loop until cancelled."""

    def on_request(self) -> None:
        """Record that a request has begun."""

    def on_response(self, scope: Scope, status_code: int) -> None:
        """Record that a request has ended, with status 499 if the client left before a response."""


class Application:
    """The ASGI application that uvicorn calls.

    Attributes:
        api: describes all routes for the OpenAPI document; it serves no requests.
        routes: the same routes, with their access levels.
        observer: counts requests; may be absent.
        tracing: makes the requests' spans (OpenTelemetry); may be absent.
    """

    def __init__(
        self,
        api: FastAPI,
        routes: RouteTable,
        http: HttpArgs,
        lifecycle: Lifecycle,
        observer: HttpObserver | None,
        last_errors: LastErrors,
        tracing: Tracing | None = None,
    ) -> None:
        """Prepare to serve the routes of `routes`.

        Args:
            api: describes the routes.
            routes: the routes to run.
            http: the options of checks: keys, origins, size of bodies.
            lifecycle: connections are closed once it says that the server drains.
            observer: is called for every request.
            last_errors: keeps the errors of requests that are refused or fail.
            tracing: makes a span of every request that is not a probe or a poll.
        """
        self.api = api
        self.routes = routes
        self._keys = Keys(http)
        self._origins = Origins(http.allow_origins, self._keys)
        self._body_limit = BodyLimit(int(http.max_body_mb * 2**20))
        self._lifecycle = lifecycle
        self.observer = observer
        self._last_errors = last_errors
        self.tracing = tracing
        # This middleware allows any origin, so origins are checked before it runs.
        self._serve_with_cors = CORSMiddleware(
            self._serve,
            allow_origins=["*"] if "*" in http.allow_origins else (),
            allow_origin_regex=".*",
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "traceresponse", HEADER],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # WebSocket and lifespan events are ignored.
        if scope["type"] != "http":
            return
        # The route is found first, because all checks depend on it.
        route = self.routes.resolve(scope)
        request_id = _request_id(scope)
        context = self._begin(scope, request_id.decode("ascii"))
        REQUEST.set(context)
        scope.setdefault("state", {})["request_id"] = context.request_id
        ignored = IgnoredFields(route.path or "")
        IGNORED.set(ignored)
        ARRIVAL.set(arrival := Arrival(context.request_id))
        status_code = 0
        reason = ""

        async def send_with_id(message: Message) -> None:
            nonlocal status_code, reason
            if message["type"] == "http.response.start":
                status_code = message["status"]
                headers = list(message.get("headers", ()))
                headers.append((b"x-request-id", request_id))
                if context.trace_id:
                    headers.append((b"traceresponse", trace_response(context)))
                if ignored.names:
                    headers.append((HEADER.encode(), ignored.header().encode("ascii")))
                if self._lifecycle.draining:
                    # The server is draining, so the client must send its next request elsewhere.
                    headers.append((b"connection", b"close"))
                message["headers"] = headers
            elif status_code >= 400 and (found := _LOGGED_REASON.search(message.get("body", b""))):
                reason = " " + _UNPRINTABLE.sub(
                    " ", found[1][:_MAX_REASON].decode("ascii", "replace")
                )
            await send(message)

        if self.observer is not None:
            self.observer.on_request()
        try:
            check_connection(scope)
            is_welcome = await self._origins.check(scope)
            serve = self._serve_with_cors if is_welcome else self._serve
            await serve(scope, receive, send_with_id)
        except Exception as error:
            if status_code == 0:
                response = error_response(error, route.dialect)
                await response(scope, receive, send_with_id)
            else:
                access_logger.exception("A response broke off")
        finally:
            arrival.closed_at, arrival.system = time.monotonic(), ""
            seconds = arrival.closed_at - arrival.began_at
            self._end(scope, context, status_code, seconds, reason)

    def _begin(self, scope: Scope, request_id: str) -> RequestContext:
        """Return the request's context, with a new span unless it is polled or has no route."""
        route: RouteMatch = scope["route"]
        if self.tracing is None or route.path is None or _is_polled(route):
            return RequestContext(request_id)
        return self.tracing.begin(scope, route.path, request_id)

    def _end(
        self, scope: Scope, context: RequestContext, status_code: int, seconds: float, reason: str
    ) -> None:
        """Count, trace and log a request; status 0 means that the client left before a response."""
        if self.observer is not None:
            self.observer.on_response(scope, status_code or 499)
        if self.tracing is not None:
            self.tracing.end(context, status_code or 499)
        path = _UNPRINTABLE.sub("?", scope["path"][:MAX_LOGGED_PATH])
        _log(scope, path, status_code or 499, seconds, reason)
        if status_code >= 400:
            self._last_errors.note(status_code, scope["method"], path, reason, context.request_id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check key and body, run the route, and send its response or the refusal."""
        route: RouteMatch = scope["route"]
        receive = self._body_limit.counting(receive)
        response: ASGIApp
        try:
            refusal = self._keys.refusal(scope) or self._body_limit.refusal(scope)
            if refusal is not None:
                raise refusal
            TENANT.set(self._keys.tenant(scope))
            response = await route.endpoint(Request(scope, receive, send))
        except Exception as error:
            response = error_response(error, route.dialect)
        await response(scope, receive, send)


def _request_id(scope: Scope) -> bytes:
    sent = [value for name, value in scope["headers"] if name == b"x-request-id"]
    if len(sent) == 1 and _REQUEST_ID.fullmatch(sent[0]):
        return bytes(sent[0])
    return random_hex(16).encode()


def _is_polled(route: RouteMatch) -> bool:
    is_open = route.access is Access.OPEN and route.path is not None
    return is_open or route.path in _POLLED_ROUTES


def _log(scope: Scope, path: str, status_code: int, seconds: float, reason: str) -> None:
    route: RouteMatch = scope["route"]
    # Lines of probes and polls have the level debug, because they would bury all others.
    level = logging.DEBUG if _is_polled(route) else logging.INFO
    if not access_logger.isEnabledFor(level):
        return
    client = scope.get("client")
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
        extra={
            "fields": {
                "method": scope["method"],
                "path": path,
                "status_code": status_code,
                "duration_ms": round(1000 * seconds, 1),
            }
        },
    )
