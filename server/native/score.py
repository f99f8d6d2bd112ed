"""`/v1/score`: returns the probabilities of label tokens as the next token after each item."""

from __future__ import annotations

from typing import Literal, TypedDict

import msgspec
from fastapi import Request
from starlette.responses import Response

from runtime.eventloop.json_body import read_json
from runtime.eventloop.json_pieces import JsonList
from runtime.service.context import ServiceContext
from runtime.service.operation import json_of, operation
from runtime.service.scoring import ScoreBody, score
from server.access import Access, AccessRouter
from server.event_stream import json_answer, unless_disconnected
from server.request_body import check_media_type, read_raw


class ScoreUsage(TypedDict):
    """Token counts, summed over all items."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: None


class Scores(TypedDict):
    """The answer of `/v1/score`; `scores` is `[num_items][num_labels]`."""

    object: Literal["scoring"]
    model: str
    scores: list[list[float]]
    usage: ScoreUsage


_DECODER = msgspec.json.Decoder(ScoreBody)


def create_router(context: ServiceContext) -> AccessRouter:
    """Create the router of `/v1/score`."""
    router = AccessRouter(Access.KEY, tags=["native"])

    @router.post("/v1/score", openapi_extra=operation(ScoreBody, ok=json_of(Scores)))
    async def score_items(request: Request) -> Response:
        """Return the probability of each label as the token after query and item.

        The probability is over the whole vocabulary, or with `apply_softmax` over the labels.
        """
        check_media_type(request)
        raw = await read_raw(request)
        body = await read_json(raw, _DECODER)
        scored = await unless_disconnected(request.receive, score(context, body, len(raw)))
        num_scores = sum(map(len, scored.scores))
        return json_answer(
            {
                "object": "scoring",
                "model": body.model or "default",
                "scores": JsonList(num_scores, scored.scores, batch=16),
                "usage": {
                    "prompt_tokens": scored.prompt_tokens,
                    "completion_tokens": 0,
                    "total_tokens": scored.prompt_tokens,
                    "prompt_tokens_details": None,
                },
            }
        )

    return router
