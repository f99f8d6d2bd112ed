"""`/v1/rerank`, and Jina's and Cohere's routes: rank documents by how well they answer a query."""

from __future__ import annotations

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.chat_template import ChatTemplate
from runtime.eventloop.json_body import read_json
from runtime.service.context import ServiceContext
from runtime.service.operation import json_of, operation
from runtime.service.reranking import (
    AskPrompt,
    Ranked,
    RelevanceAnswer,
    RelevanceBody,
    RerankBody,
    rank_by_relevance,
    rerank,
)
from server.access import Access, AccessRouter
from server.dialect import Dialect
from server.event_stream import json_answer, unless_disconnected
from server.request_body import check_media_type, read_raw

_DECODER = msgspec.json.Decoder(RerankBody)
_RELEVANCE = msgspec.json.Decoder(RelevanceBody)


def create_router(context: ServiceContext, template: ChatTemplate | None) -> AccessRouter:
    """Create the router of the routes; `template` is the model's chat template."""
    # Errors have OpenAI's format, because Cohere's clients find the message in it too.
    router = AccessRouter(Access.KEY, tags=["native"], dialect=Dialect.OPENAI)
    ask = _asker(template)

    async def rerank_documents(request: Request) -> Response:
        """Return the documents with their scores, the best first."""
        check_media_type(request)
        body = await read_json(await read_raw(request), _DECODER)
        found = await unless_disconnected(request.receive, rerank(context, body, ask))
        return json_answer(found)

    async def answer_relevance(
        request: Request, route: str, *, returns_documents: bool
    ) -> Response:
        check_media_type(request)
        body = await read_json(await read_raw(request), _RELEVANCE)
        found = rank_by_relevance(
            context, body, ask, route=route, returns_documents=returns_documents
        )
        return json_answer(await unless_disconnected(request.receive, found))

    async def rerank_as_jina(request: Request) -> Response:
        """Return the documents with their relevance, the best first, in Jina's format."""
        return await answer_relevance(request, "/rerank", returns_documents=True)

    async def rerank_as_cohere(request: Request) -> Response:
        """Return the documents' indices and relevance, the best first, in Cohere's format."""
        return await answer_relevance(request, "/v2/rerank", returns_documents=False)

    documented = operation(RerankBody, ok=json_of(list[Ranked]))
    router.add_api_route(
        "/v1/rerank", rerank_documents, methods=["POST", "PUT"], openapi_extra=documented
    )
    documented = operation(RelevanceBody, ok=json_of(RelevanceAnswer))
    router.add_api_route("/rerank", rerank_as_jina, methods=["POST"], openapi_extra=documented)
    router.add_api_route("/v2/rerank", rerank_as_cohere, methods=["POST"], openapi_extra=documented)
    return router


def _asker(template: ChatTemplate | None) -> AskPrompt | None:
    """Return a function that writes a yes-or-no reranker's prompt; None for other models."""
    if template is None or not template.asks_yes_or_no:
        return None

    async def ask(instruction: str, query: str, document: str) -> str:
        messages = [
            {"role": "system", "content": instruction},
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        return await template.render_async(messages)

    return ask
