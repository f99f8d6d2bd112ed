"""`/v1/score`: probabilities of label tokens right after a query and each of its items."""

from __future__ import annotations

import msgspec
from fastapi import Request
from starlette.responses import Response

from openai_api.access import Access, AccessRouter
from openai_api.request_body import read_body
from openai_api.sse import unless_disconnected
from runtime.service.context import ServiceContext
from runtime.service.scoring import ScoreBody, score
from server.error_responses import json_response
from server.native.schema import body_schema

_DECODER = msgspec.json.Decoder(ScoreBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """The route `/v1/score`."""
    router = AccessRouter(Access.KEY, tags=["native"])

    @router.post("/v1/score", openapi_extra=body_schema(ScoreBody))
    async def score_items(request: Request) -> Response:
        """Probability of each label after `query` + item, over the vocabulary or the labels."""
        body = await read_body(request, _DECODER)
        scored = await unless_disconnected(request.receive, score(context, body))
        return json_response(
            {
                "object": "scoring",
                "model": body.model or "default",
                "scores": scored.scores,
                "usage": {
                    "prompt_tokens": scored.prompt_tokens,
                    "completion_tokens": 0,
                    "total_tokens": scored.prompt_tokens,
                    "prompt_tokens_details": None,
                },
            }
        )

    return router
