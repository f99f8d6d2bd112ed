"""The OpenAI routes over HTTP: a call for each request, and one place that answers errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

from fastapi import Request
from starlette.responses import Response

import openai_api.router
from openai_api.call import Call, Reply, Streamed
from openai_api.openai_context import OpenAIContext
from openai_api.openai_errors import error_event
from openai_api.router import Handler
from runtime.config.registry import load_object
from server.access import Access, AccessRouter
from server.error_responses import openai_error
from server.event_stream import EventStream, json_answer, unless_disconnected, with_errors
from server.request_body import check_media_type, read_raw


def create_router(context: OpenAIContext) -> AccessRouter:
    """All OpenAI routes, bound to `context`."""
    router = AccessRouter(Access.KEY, tags=["OpenAI"], speaks_openai=True)
    for endpoint in openai_api.router.ENDPOINTS:
        router.add_api_route(
            endpoint.path,
            _bound(cast("Handler", load_object(endpoint.handler)), context),
            methods=[endpoint.method],
            name=endpoint.handler.rpartition(":")[2],
            summary=endpoint.summary,
            response_model=None,
            openapi_extra=endpoint.documented,
        )
    return router


def _bound(handler: Handler, context: OpenAIContext) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return _response(await _ask(request, handler, context))
        except Exception as error:
            return openai_error(error)

    answer.__doc__ = handler.__doc__
    return answer


async def _ask(request: Request, handler: Handler, context: OpenAIContext) -> Reply:
    if request.method != "POST":
        return await handler(Call(path=request.path_params), context)
    check_media_type(request)
    call = Call(await read_raw(request), request.path_params)
    return await unless_disconnected(request.receive, _call(handler, call, context))


async def _call(handler: Handler, call: Call, context: OpenAIContext) -> Reply:
    return await handler(call, context)


def _response(reply: Reply) -> Response:
    if isinstance(reply, Streamed):
        return EventStream(with_errors(reply.events, error_event), reply.on_end)
    return json_answer(reply.content)
