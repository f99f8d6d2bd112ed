"""The routes of OpenAI's, Anthropic's and Ollama's APIs over HTTP, with their errors' formats."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

from fastapi import Request
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import Response, StreamingResponse

import anthropic_api.endpoint_table
import ollama_api.ollama_table
import openai_api.routes
from anthropic_api import anthropic_errors
from ollama_api.ollama_lines import error_line
from openai_api import openai_errors
from openai_api.call import Call, FileContent, Reply, Streamed
from openai_api.openai_context import OpenAIContext
from openai_api.routes import Endpoint, Handler
from runtime.config.registry import load_object
from runtime.service.generation import Chunk
from server.access import Access, AccessRouter
from server.dialect import Dialect
from server.error_responses import error_response
from server.event_stream import EventStream, json_answer, unless_disconnected, with_errors
from server.request_body import check_media_type, read_raw

_PIECE_BYTES = 256 * 1024


class _Id(Convertor[str]):
    """A part of a path with the form of an id, so that it cannot be mistaken for another route."""

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


class _ResponseId(_Id):
    regex = "resp_[0-9A-Za-z_]{1,128}"


class _FileId(_Id):
    regex = "file-[0-9A-Za-z_]{1,128}"


class _BatchId(_Id):
    regex = "batch_[0-9A-Za-z_]{1,128}"


register_url_convertor("response_id", _ResponseId())
register_url_convertor("file_id", _FileId())
register_url_convertor("batch_id", _BatchId())


@dataclass(frozen=True)
class Wire:
    """One of the three APIs: OpenAI's, Anthropic's or Ollama's.

    Attributes:
        dialect: the API, which decides the format of errors.
        name: its name in the OpenAPI document.
        endpoints: its routes.
        error_event: encodes an error as an event of a stream that has begun.
    """

    dialect: Dialect
    name: str
    endpoints: Iterable[Endpoint]
    error_event: Callable[[Exception], Chunk]


def create_routers(context: OpenAIContext) -> list[AccessRouter]:
    """Return routers with the routes of OpenAI's, Anthropic's and Ollama's APIs."""
    openai = Wire(Dialect.OPENAI, "OpenAI", openai_api.routes.ENDPOINTS, openai_errors.error_event)
    anthropic = Wire(
        Dialect.ANTHROPIC,
        "Anthropic",
        anthropic_api.endpoint_table.ENDPOINTS,
        anthropic_errors.error_event,
    )
    ollama = Wire(Dialect.OLLAMA, "Ollama", ollama_api.ollama_table.ENDPOINTS, error_line)
    return [_create_router(wire, context) for wire in (openai, anthropic, ollama)]


def _create_router(wire: Wire, context: OpenAIContext) -> AccessRouter:
    """Return a router with all routes of one API."""
    router = AccessRouter(Access.KEY, tags=[wire.name], dialect=wire.dialect)
    for endpoint in wire.endpoints:
        router.add_api_route(
            endpoint.path,
            _bound(endpoint, context, wire),
            methods=[endpoint.method],
            name=endpoint.handler.rpartition(":")[2],
            summary=endpoint.summary,
            response_model=None,
            openapi_extra=endpoint.documented,
        )
    return router


def _bound(
    endpoint: Endpoint, context: OpenAIContext, wire: Wire
) -> Callable[[Request], Awaitable[Response]]:
    handler = cast("Handler", load_object(endpoint.handler))

    async def answer(request: Request) -> Response:
        try:
            return _response(await _ask(request, handler, endpoint, context), wire)
        except Exception as error:
            return error_response(error, wire.dialect)

    answer.__doc__ = handler.__doc__
    return answer


async def _ask(
    request: Request, handler: Handler, endpoint: Endpoint, context: OpenAIContext
) -> Reply:
    query = dict(request.query_params)
    if request.method != "POST":
        return await handler(Call(path=request.path_params, query=query), context)
    if endpoint.takes_json:
        check_media_type(request)
    content_type = request.headers.get("content-type", "")
    call = Call(await read_raw(request), request.path_params, query, content_type)
    return await unless_disconnected(request.receive, _call(handler, call, context))


async def _call(handler: Handler, call: Call, context: OpenAIContext) -> Reply:
    return await handler(call, context)


def _response(reply: Reply, wire: Wire) -> Response:
    if isinstance(reply, Streamed):
        events = with_errors(reply.events, wire.error_event, reply.end)
        return EventStream(events, reply.on_end, media_type=reply.media_type)
    if isinstance(reply, FileContent):
        headers = {"content-length": str(reply.num_bytes)}
        return StreamingResponse(
            _pieces(reply.file), headers=headers, media_type="application/octet-stream"
        )
    return json_answer(reply.content)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
