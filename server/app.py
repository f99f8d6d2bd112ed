"""Builds the application: the routes of all APIs, the metrics and the OpenAPI document."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from openai_api.openai_context import OpenAIContext
from runtime.service.operation import Query, operation, text
from server.access import Access, AccessRouter
from server.entry.application import Application
from server.entry.last_errors import LastErrors, create_errors_router
from server.error_responses import RouteNotFound
from server.metrics import Metrics
from server.native import (
    abort,
    adapters,
    adjust,
    cloud,
    control,
    docs_page,
    encode,
    expert_distribution,
    explain,
    explain_request,
    generate,
    health,
    info,
    loads,
    page,
    parse,
    pooling,
    profile,
    rerank,
    score,
    select,
    sessions,
    tokenize,
    weights,
)
from server.openapi import Description
from server.request_log import RequestLog
from server.routing import RouteTable
from server.tracing import Tracing
from server.wire_routes import create_routers as create_wire_routers

_METRICS = operation(
    ok=text(),
    refuses=(400,),
    query=(Query("prefix", str, "What names begin with instead of `sglang:`, such as headrace_."),),
)


def create_app(openai: OpenAIContext) -> Application:
    """Build the application for the service in `openai`."""
    context = openai.service
    http = context.config.http
    api = Description(context.version, http)
    routers = [generate.create_router(context), *create_wire_routers(openai)]
    routers.append(tokenize.create_router(context, openai.chat_template))
    routers.append(rerank.create_router(context, openai.chat_template))
    routers += [module.create_router(openai) for module in (explain, info)]
    modules = (
        health,
        sessions,
        score,
        select,
        encode,
        pooling,
        expert_distribution,
        parse,
        loads,
        control,
        abort,
        explain_request,
        profile,
        weights,
        adapters,
    )
    routers += [module.create_router(context) for module in modules]
    request_log = RequestLog(context.config.logging, context.client, context.tokenizer)
    routers.append(adjust.create_router(context, request_log))
    metrics = Metrics(context) if context.config.logging.enable_metrics else None
    if metrics is not None:
        context.client.sinks.append(metrics.on_record)
    routers.append(_metrics_router(metrics))
    tracing = None
    if (endpoint := context.config.logging.otlp_traces_endpoint) is not None:
        name = context.config.model.served_model_name or ""
        tracing = Tracing(endpoint, name, context.version)
        context.client.sinks.append(tracing.on_record)
    last_errors = LastErrors()
    routers.append(create_errors_router(last_errors))
    if not http.disable_docs:
        routers.append(docs_page.create_router())
    routers.append(page.create_router(http))
    # An environment variable sets one of this router's paths. The router comes last, so that this
    # path does not replace another route.
    routers.append(cloud.create_router(context))
    table = RouteTable(http.fastapi_root_path)
    for route in api.routes:
        # These routes serve the OpenAPI document.
        table.add(route, Access.KEY)
    for router in routers:
        _include(api, table, router)
    table.show_page("/", f"/page/{page.INDEX}")

    return Application(api, table, http, context.lifecycle, metrics, last_errors, tracing)


def _include(api: Description, table: RouteTable, router: AccessRouter) -> None:
    """Add the routes of `router` to the OpenAPI document and to the table of callable routes.

    Other parts of the router, such as lifespan events, are ignored.
    """
    for route in router.routes:
        match = table.add(
            route, router.access, router.dialect, serves_tenants=router.serves_tenants
        )
        api.describe(route, match)


def _metrics_router(metrics: Metrics | None) -> AccessRouter:
    router = AccessRouter(Access.OPEN, tags=["health"], include_in_schema=metrics is not None)

    @router.get("/metrics", openapi_extra=_METRICS)
    async def metrics_page(request: Request) -> Response:
        """Return the metrics in Prometheus' text format."""
        if metrics is None:
            raise RouteNotFound("GET /metrics: the server was started without --enable-metrics")
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        page = metrics.render(request.query_params.get("prefix", ""))
        return Response(page, headers={"content-type": content_type})

    return router
