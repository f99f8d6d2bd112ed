"""`/v1/classify`: the most probable class of each text, and all classes' probabilities."""

from __future__ import annotations

import time

from openai_api.call import Call, Whole
from openai_api.endpoints.embeddings import text_inputs
from openai_api.openai_context import OpenAIContext
from openai_api.request_body import read_body
from openai_api.schemas.classify import DECODER
from runtime.service.classes import classify, require_scores
from runtime.service.generation import new_id
from runtime.service.text_embeddings import TextOptions, embed


async def create_classification(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /v1/classify` with the class of each input, in order."""
    body = await read_body(call, DECODER)
    model = context.service.model
    require_scores(model, "/v1/classify")
    options = TextOptions(rid=body.rid, priority=body.priority)
    found = await embed(context.service, text_inputs(body.input), options)
    num_tokens = sum(each.prompt_tokens for each in found)
    data = []
    for index, each in enumerate(found):
        classified = classify(model, each)
        data.append(
            {
                "index": index,
                "label": classified.label,
                "probs": classified.probabilities,
                "num_classes": len(classified.probabilities),
            }
        )
    answer = {
        "id": new_id("classify", None),
        "object": "list",
        "created": int(time.time()),
        "model": body.model or context.service.served_model_name,
        "data": data,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return Whole(answer)
