"""`/api/embed` and `/api/embeddings`: vectors of texts, in the format of Ollama's API."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec

from ollama_api.ollama_answers import OldEmbedding
from ollama_api.ollama_request import OllamaEmbeddingsRequest, OllamaEmbedRequest
from openai_api.call import Call, Whole
from openai_api.openai_context import OpenAIContext
from openai_api.request_body import read_body
from runtime.eventloop.json_pieces import JsonList
from runtime.service.text_embeddings import TextOptions, embed

_EMBED = msgspec.json.Decoder(OllamaEmbedRequest)
_EMBEDDINGS = msgspec.json.Decoder(OllamaEmbeddingsRequest)


async def create_embeddings(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /api/embed` with a vector of unit length for each text."""
    began = time.perf_counter_ns()
    request = await read_body(call, _EMBED)
    texts = [request.input] if isinstance(request.input, str) else request.input or []
    # Texts that are too long are truncated unless the request disables that.
    options = TextOptions(dimensions=request.dimensions, truncate=request.truncate is not False)
    # A request without texts only asks to load the model.
    found = await embed(context.service, texts, options) if texts and texts != [""] else []
    return Whole(
        {
            "model": request.model,
            # A million numbers are converted to JSON while they are sent.
            "embeddings": JsonList(
                sum(len(each.numbers) for each in found), (_unit(each.numbers) for each in found)
            ),
            "total_duration": time.perf_counter_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": sum(each.prompt_tokens for each in found),
        }
    )


async def create_old_embedding(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /api/embeddings`, the older route, with one vector that is not normalized."""
    request = await read_body(call, _EMBEDDINGS)
    answer: OldEmbedding = {"embedding": []}
    if request.prompt:
        (found,) = await embed(context.service, [request.prompt], TextOptions(truncate=True))
        answer["embedding"] = found.numbers.tolist()
    return Whole(answer)


def _unit(numbers: Sequence[float]) -> list[float]:
    norm = math.hypot(*numbers) or 1.0
    return [number / norm for number in numbers]
