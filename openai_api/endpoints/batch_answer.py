"""Answers the lines of batch files: calls the routes' handlers without HTTP."""

from __future__ import annotations

from typing import Any

import orjson

from openai_api.batches.batch_lines import URLS, refused, response_of
from openai_api.call import Call, Whole
from openai_api.endpoints.chat_completions import create_chat_completion
from openai_api.endpoints.completions import create_completion
from openai_api.endpoints.embeddings import create_embeddings
from openai_api.endpoints.responses import create_response
from openai_api.openai_context import OpenAIContext
from runtime.eventloop.ignored_fields import IGNORED, IgnoredFields
from runtime.eventloop.json_pieces import all_pieces

_HANDLERS = dict(
    zip(
        URLS,
        (create_chat_completion, create_completion, create_embeddings, create_response),
        strict=True,
    )
)


async def answer(context: OpenAIContext, url: str, body: bytes) -> dict[str, Any]:
    """Compute one line's request; return the object `response` of its output line.

    It runs on the server's event loop. A request that is refused also has a response, with the
    error's status and OpenAI's error object.

    Args:
        context: the server's context.
        url: the request's path.
        body: the request's JSON body.
    """
    IGNORED.set(IgnoredFields(url))
    try:
        reply = await _HANDLERS[url](Call(body), context)
        assert isinstance(reply, Whole), "nothing is streamed in a batch"
        content = orjson.loads(b"".join(all_pieces(reply.content)))
    except Exception as error:
        return refused(error)
    return response_of(200, content)
