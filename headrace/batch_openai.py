"""Lines of OpenAI's batch files: `custom_id`, `method`, `url`, `body` in, their answers out.

The answers are those of the server's routes: the same code makes them, without HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from openai_api.endpoints.chat_completions import create_chat_completion
from openai_api.endpoints.completions import create_completion
from openai_api.endpoints.embeddings import create_embeddings
from openai_api.openai_context import OpenAIContext
from openai_api.openai_errors import error_response

Handler = Callable[[Request, OpenAIContext], Awaitable[Response]]
HANDLERS: dict[str, Handler] = {
    "/v1/chat/completions": create_chat_completion,
    "/v1/completions": create_completion,
    "/v1/embeddings": create_embeddings,
}
_KEYS = frozenset({"custom_id", "method", "url", "body"})


class BadLine(ValueError):
    """A line is no request of a batch."""


def check_line(request: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Path and body of the request in a line.

    Raises:
        BadLine: a part is missing or not what it has to be.
    """
    unknown = sorted(set(request) - _KEYS)
    if unknown:
        raise BadLine(f"Unknown key {unknown[0]!r}; known are {', '.join(sorted(_KEYS))}.")
    if not isinstance(request.get("custom_id"), str):
        raise BadLine("custom_id must be a string: it is what the answer is found by.")
    if request.get("method", "POST") != "POST":
        raise BadLine(f"method must be POST, got {str(request['method'])[:32]!r}.")
    url, body = request.get("url"), request.get("body")
    if url not in HANDLERS:
        raise BadLine(f"url must be one of {', '.join(HANDLERS)}, got {str(url)[:64]!r}.")
    if not isinstance(body, dict):
        raise BadLine("body must be a JSON object.")
    if body.get("stream"):
        raise BadLine("stream is not possible in a batch: an answer is one line.")
    return url, body


async def answer(context: OpenAIContext, url: str, body: dict[str, Any]) -> dict[str, Any]:
    """`response` of the output line; runs on the engine's loop.

    A request that is refused has a response too, with its status and OpenAI's error object.
    """
    payload = orjson.dumps(body)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(payload)).encode()),
    ]
    scope = {"type": "http", "method": "POST", "path": url, "headers": headers}
    unread = [payload]

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        # Nobody leaves before the answer.
        return await asyncio.get_running_loop().create_future()

    status, parts = 0, []

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    try:
        made = await HANDLERS[url](Request(scope, receive), context)
    except Exception as error:
        made = error_response(error)
    await made(scope, receive, send)
    return {
        "status_code": status,
        "request_id": secrets.token_hex(16),
        "body": orjson.loads(b"".join(parts)),
    }
