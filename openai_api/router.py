"""The OpenAI routes: a table of endpoints, each a file, behind one place that answers errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import cast

from fastapi import Request
from starlette.responses import Response

from openai_api.access import Access, AccessRouter
from openai_api.openai_context import OpenAIContext
from openai_api.openai_errors import error_response
from runtime.config.registry import load_object

Handler = Callable[[Request, OpenAIContext], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """One route.

    Attributes:
        handler: string path of a coroutine `(request, context) -> Response`.
    """

    method: str
    path: str
    handler: str
    summary: str


ENDPOINTS = (
    Endpoint(
        "POST",
        "/v1/chat/completions",
        "openai_api.endpoints.chat_completions:create_chat_completion",
        "Answer a conversation",
    ),
    # Where SageMaker sends what its clients ask.
    Endpoint(
        "POST",
        "/invocations",
        "openai_api.endpoints.chat_completions:create_chat_completion",
        "Answer a conversation, for SageMaker",
    ),
    Endpoint(
        "POST",
        "/v1/completions",
        "openai_api.endpoints.completions:create_completion",
        "Continue a text",
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        "openai_api.endpoints.embeddings:create_embeddings",
        "Vectors of texts",
    ),
    Endpoint(
        "POST",
        "/v1/classify",
        "openai_api.endpoints.classify:create_classification",
        "Classes of texts",
    ),
    Endpoint("GET", "/v1/models", "openai_api.endpoints.models:list_models", "List the models"),
    Endpoint(
        "GET",
        "/v1/models/{model_id:path}",
        "openai_api.endpoints.models:retrieve_model",
        "Describe a model",
    ),
)


def create_router(context: OpenAIContext) -> AccessRouter:
    """All OpenAI routes, bound to `context`."""
    router = AccessRouter(Access.KEY, tags=["OpenAI"])
    for endpoint in ENDPOINTS:
        router.add_api_route(
            endpoint.path,
            _bound(cast("Handler", load_object(endpoint.handler)), context),
            methods=[endpoint.method],
            name=endpoint.handler.rpartition(":")[2],
            summary=endpoint.summary,
            response_model=None,
            openapi_extra=_BODY if endpoint.method == "POST" else None,
        )
    return router


_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


def _bound(handler: Handler, context: OpenAIContext) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return await handler(request, context)
        except Exception as error:
            return error_response(error)

    return answer
