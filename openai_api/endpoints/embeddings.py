"""`/v1/embeddings`: vectors of texts."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence

from openai_api.call import Call, Whole
from openai_api.openai_context import OpenAIContext
from openai_api.request_body import read_body
from openai_api.schemas.embeddings import DECODER
from runtime.errors import InvalidRequest
from runtime.eventloop.json_pieces import JsonList
from runtime.service.text_embeddings import TextInput, TextOptions, embed


async def create_embeddings(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /v1/embeddings` with a vector for each input, in order."""
    body = await read_body(call, DECODER)
    if context.service.model.gives == "scores":
        raise InvalidRequest(
            "This server's model scores texts and does not give vectors: use /v1/classify, "
            "/classify or /v1/rerank."
        )
    options = TextOptions(
        rid=body.rid,
        dimensions=body.dimensions,
        prompt=body.prompt,
        prompt_name=body.prompt_name,
        priority=body.priority,
    )
    inputs = text_inputs(body.input)
    if not all(inputs):
        # An empty text is refused, as by OpenAI: its vector would reflect special tokens only.
        raise InvalidRequest("input must hold no empty text and no empty list.", param="input")
    found = await embed(context.service, inputs, options)
    num_tokens = sum(each.prompt_tokens for each in found)
    answer = {
        "object": "list",
        # All vectors together may have millions of numbers, so they are encoded while they are
        # sent.
        "data": JsonList(
            sum(len(each.numbers) for each in found),
            (
                {
                    "object": "embedding",
                    "embedding": written(each.numbers, body.encoding_format),
                    "index": index,
                }
                for index, each in enumerate(found)
            ),
        ),
        "model": body.model or context.service.served_model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return Whole(answer)


def text_inputs(given: str | list[str | int | list[int]]) -> list[TextInput]:
    """Return the texts or the lists of token ids of the field `input`.

    Raises:
        InvalidRequest: `input` mixes texts and ids.
    """
    given = [given] if isinstance(given, str) else given
    ids = [each for each in given if isinstance(each, int)]
    others = [each for each in given if not isinstance(each, int)]
    if (ids and others) or len({type(each) for each in others}) > 1:
        raise InvalidRequest("input must hold texts, ids, or lists of ids alone.", param="input")
    return [ids] if ids else [*others]


def written(numbers: Sequence[float], encoding_format: str) -> list[float] | str:
    """Return numbers in their JSON form: a list, or little-endian float32 bytes in base64."""
    if encoding_format == "float":
        return list(numbers)
    packed = array("f", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode("ascii")
