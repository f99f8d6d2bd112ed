"""The application: every route, wrapped in the middlewares that hold for all of them."""

from __future__ import annotations

from typing import get_type_hints

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from openai_api.context import OpenAIContext
from openai_api.router import create_router as create_openai_router
from runtime.errors import HeadraceError
from server.context import ServerContext
from server.errors import error_response
from server.metrics import Metrics
from server.middleware.auth import AuthMiddleware
from server.middleware.body_limit import BodyLimitMiddleware
from server.middleware.entry import EntryMiddleware, HttpObserver
from server.middleware.origin import OriginMiddleware
from server.native import (
    adjust,
    cloud,
    control,
    generate,
    health,
    info,
    loads,
    parse,
    pooling,
    profile,
    score,
    sessions,
    tokenize,
    weights,
)
from server.request_log import RequestLog

_PLAIN_HANDLER = {"request": Request, "return": Response}


class Application:
    """What uvicorn calls.

    Attributes:
        api: the FastAPI application with all routes, without the middlewares.
    """

    def __init__(self, api: FastAPI, outermost: ASGIApp) -> None:
        """Serve `api` through `outermost`."""
        self.api = api
        self._outermost = outermost

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outermost(scope, receive, send)


def create_app(context: ServerContext, openai: OpenAIContext) -> Application:
    """Build the application around `context`."""
    http = context.config.http
    has_docs = not http.disable_docs
    api = FastAPI(
        title="Headrace",
        version=context.version,
        openapi_url="/openapi.json" if has_docs else None,
        docs_url="/docs" if has_docs else None,
        redoc_url=None,
        # A redirect would send a body to a path that auth has not decided on.
        redirect_slashes=False,
    )
    # Routes are looked through in this order: those that carry the load come first.
    _include(api, generate.create_router(context))
    _include(api, create_openai_router(openai))
    for module in (
        health,
        info,
        sessions,
        tokenize,
        score,
        pooling,
        parse,
        loads,
        control,
        profile,
        weights,
    ):
        _include(api, module.create_router(context))
    request_log = RequestLog(context.config.logging, context.client, context.tokenizer)
    _include(api, adjust.create_router(context, request_log))
    # Last: its path comes from outside and must take no other route's place.
    _include(api, cloud.create_router(context))
    api.add_exception_handler(HeadraceError, _answer_error)
    api.add_exception_handler(Exception, _answer_error)
    observers = _add_observers(api, context)

    # From the inside out: the last one wrapped is the first one asked.
    app: ASGIApp = api
    app = BodyLimitMiddleware(app, int(http.max_body_mb * 2**20))
    app = AuthMiddleware(app, http.api_key, http.admin_api_key, http.fastapi_root_path)
    app = OriginMiddleware(app, http.allow_origins)
    if http.allow_origins:
        app = CORSMiddleware(
            app,
            allow_origins=http.allow_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app = EntryMiddleware(app, context.lifecycle, observers, http.fastapi_root_path)
    return Application(api, app)


def _include(api: FastAPI, router: APIRouter) -> None:
    """Add the routes of `router`, each as short a way from the request as its handler allows.

    FastAPI looks an included router's routes through twice, by slower code than its own, and
    prepares dependencies and files for handlers that have none: up to a quarter of what a request
    took here. Only the routes count: what else a router may have (events of its life span) is not
    looked at.
    """
    for route in router.routes:
        if isinstance(route, APIRoute) and _is_plain(route):
            route.app = request_response(route.endpoint)
        api.router.routes.append(route)


def _is_plain(route: APIRoute) -> bool:
    """Whether FastAPI has nothing to do for its handler: a request in, a response out."""
    has_guards = route.dependencies or getattr(route, "max_body_size", None) is not None
    return not has_guards and get_type_hints(route.endpoint) == _PLAIN_HANDLER


def _add_observers(api: FastAPI, context: ServerContext) -> list[HttpObserver]:
    if not context.config.logging.enable_metrics:
        return []
    metrics = Metrics(context)
    context.client.sinks.append(metrics.on_record)

    @api.get("/metrics", tags=["health"])
    async def metrics_page() -> Response:
        """Prometheus metrics."""
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return Response(metrics.render(), headers={"content-type": content_type})

    return [metrics]


async def _answer_error(request: Request, error: Exception) -> Response:
    return error_response(error, request.scope["path"])
