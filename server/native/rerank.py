"""`/v1/rerank`: documents by how well they answer a query."""

from __future__ import annotations

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.chat_template import ChatTemplate
from openai_api.operation import json_of, operation
from runtime.client.json_body import read_json
from runtime.service.context import ServiceContext
from runtime.service.reranking import AskPrompt, Ranked, RerankBody, rerank
from server.access import Access, AccessRouter
from server.event_stream import json_answer, unless_disconnected
from server.request_body import check_media_type, read_raw

_DECODER = msgspec.json.Decoder(RerankBody)


def create_router(context: ServiceContext, template: ChatTemplate | None) -> AccessRouter:
    """The route; `template` is what chat renders with."""
    router = AccessRouter(Access.KEY, tags=["native"])
    ask = _asker(template)

    async def rerank_documents(request: Request) -> Response:
        """The documents with their scores, the best first."""
        check_media_type(request)
        body = await read_json(await read_raw(request), _DECODER)
        found = await unless_disconnected(request.receive, rerank(context, body, ask))
        return json_answer(found)

    documented = operation(RerankBody, ok=json_of(list[Ranked]))
    router.add_api_route(
        "/v1/rerank", rerank_documents, methods=["POST", "PUT"], openapi_extra=documented
    )
    return router


def _asker(template: ChatTemplate | None) -> AskPrompt | None:
    """What writes a prompt that a yes or a no follows, where the template does that."""
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
