"""`/v1/responses`: answer items by items; later turns go on from what is kept."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from openai_api.call import Call, Reply, Streamed, Whole
from openai_api.chat_prompt import build_chat_prompt
from openai_api.chat_run import open_chat
from openai_api.openai_context import OpenAIContext
from openai_api.request_body import read_body
from openai_api.responses.chat_of_items import chat_of, set_generation
from openai_api.responses.item_writer import Event
from openai_api.responses.offered_tools import OfferedTools
from openai_api.responses.response_run import ResponseRun
from openai_api.responses.response_store import StoredResponse
from openai_api.schemas.chat import ChatCompletionRequest, check_chat_request
from openai_api.schemas.responses import (
    DECODER,
    ITEMS_DECODER,
    ItemsRequest,
    ResponseRequest,
    refuse_unsupported_items,
)
from runtime.errors import HeadraceError, InvalidRequest
from runtime.service.events import Chunk, joined, named_event

_PREFIX = "resp_"


class UnknownResponse(HeadraceError):
    """No response of this id is kept."""

    status_code = 404


async def create_response(call: Call, context: OpenAIContext) -> Reply:
    """Answer `POST /v1/responses`."""
    request = await read_body(call, DECODER)
    _check(request, context)
    response_id = f"{_PREFIX}{secrets.token_hex(24)}"
    with _wire_names():
        items, tools, chat = await _conversation(request, context)
        set_generation(chat, request)
        chat.rid = response_id
        opened = await open_chat(chat, context)
    run = ResponseRun(response_id, request, items, tools, opened, context)
    if request.background:
        await context.background_responses.start(run)
        return Whole(run.response)
    if request.stream:
        return Streamed(_encoded(run.streamed(await opened.begun())), run.close, end=b"")
    return Whole(await run.whole())


async def count_input_tokens(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /v1/responses/input_tokens`."""
    chat = await prompt_of_response(await read_body(call, ITEMS_DECODER), context)
    with _wire_names():
        prompt = await build_chat_prompt(chat, context)
    return Whole({"object": "response.input_tokens", "input_tokens": len(prompt.input_ids)})


async def prompt_of_response(
    request: ItemsRequest, context: OpenAIContext
) -> ChatCompletionRequest:
    """The chat that makes the prompt of a request, checked.

    Raises:
        InvalidRequest: the first thing wrong.
    """
    refuse_unsupported_items(request)
    with _wire_names():
        _, _, chat = await _conversation(request, context)
        check_chat_request(chat)
    return chat


async def retrieve_response(call: Call, context: OpenAIContext) -> Whole:
    """Answer `GET /v1/responses/{response_id}`."""
    response_id = call.path["response_id"]
    stored = await _stored(response_id, context)
    return Whole(context.background_responses.running(response_id) or stored.response)


async def list_input_items(call: Call, context: OpenAIContext) -> Whole:
    """Answer `GET /v1/responses/{response_id}/input_items`."""
    stored = await _stored(call.path["response_id"], context)
    # Newest first, as OpenAI lists them.
    items = [
        {"id": f"item_{index}", "type": "message", **item}
        for index, item in reversed(list(enumerate(stored.items)))
    ]
    return Whole(
        {
            "object": "list",
            "data": items,
            "first_id": items[0]["id"] if items else None,
            "last_id": items[-1]["id"] if items else None,
            "has_more": False,
        }
    )


async def delete_response(call: Call, context: OpenAIContext) -> Whole:
    """Answer `DELETE /v1/responses/{response_id}`."""
    response_id = call.path["response_id"]
    await _stored(response_id, context)
    await context.background_responses.cancel(response_id)
    if context.responses is not None:
        await context.responses.delete(response_id)
    return Whole({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /v1/responses/{response_id}/cancel`.

    Raises:
        InvalidRequest: the response was not made in the background.
    """
    response_id = call.path["response_id"]
    stored = await _stored(response_id, context)
    if not stored.response["background"]:
        raise InvalidRequest("Only a response with background can be cancelled.")
    if await context.background_responses.cancel(response_id):
        stored = await _stored(response_id, context)
    return Whole(stored.response)


def _check(request: ResponseRequest, context: OpenAIContext) -> None:
    refuse_unsupported_items(request)
    if request.background:
        if request.stream:
            raise InvalidRequest(
                "background cannot be streamed here; ask for the response by its id.",
                param="background",
            )
        if request.store is False or context.responses is None:
            raise InvalidRequest("background needs store: how else to ask for it?", param="store")


async def _conversation(
    request: ItemsRequest, context: OpenAIContext
) -> tuple[list[dict[str, Any]], OfferedTools, ChatCompletionRequest]:
    items: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        items = await _before(request.previous_response_id, context)
    if isinstance(request.input, str):
        items.append({"type": "message", "role": "user", "content": request.input})
    else:
        items += request.input
    tools = OfferedTools.read(request.tools or [])
    return items, tools, chat_of(request, items, tools)


async def _before(response_id: str, context: OpenAIContext) -> list[dict[str, Any]]:
    stored = await context.responses.get(response_id) if context.responses is not None else None
    if stored is None:
        error = InvalidRequest(
            f"Previous response with id {response_id[:64]!r} not found. This server keeps "
            "responses with store for a day, the newest (--response-store-mb).",
            param="previous_response_id",
        )
        error.code = "previous_response_not_found"
        raise error
    if stored.response["status"] in ("queued", "in_progress"):
        raise InvalidRequest(
            "The previous response is not complete yet.", param="previous_response_id"
        )
    return [*stored.items, *stored.response["output"]]


async def _stored(response_id: str, context: OpenAIContext) -> StoredResponse:
    stored = await context.responses.get(response_id) if context.responses is not None else None
    if stored is None:
        raise UnknownResponse(f"Response with id {response_id[:64]!r} not found.")
    return stored


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Chunk, None]:
    try:
        async for each in events:
            for ready in joined([named_event(each["type"], each)]):
                yield ready
    finally:
        await events.aclose()


@contextmanager
def _wire_names() -> Iterator[None]:
    """Rename chat's fields to this wire's in the errors of the block."""
    names = {"max_completion_tokens": "max_output_tokens", "messages": "input"}

    def renamed(text: str) -> str:
        text = re.sub(r"\.function\.(parameters|name|strict)\b", r".\1", text)
        return re.sub(r"\b(max_completion_tokens|messages)\b", lambda found: names[found[0]], text)

    try:
        yield
    except InvalidRequest as error:
        error.message, error.param = renamed(error.message), error.param and renamed(error.param)
        raise
