"""The application: every route, wrapped in the middlewares that hold for all of them."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
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
    for module in (
        health,
        info,
        generate,
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
        api.include_router(module.create_router(context))
    request_log = RequestLog(context.config.logging, context.client, context.tokenizer)
    api.include_router(adjust.create_router(context, request_log))
    api.include_router(create_openai_router(openai))
    # Last: its path comes from outside and must take no other route's place.
    api.include_router(cloud.create_router(context))
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
