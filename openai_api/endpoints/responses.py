"""`/v1/responses`: takes and returns items; a later request may continue a stored response."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from openai_api.call import Call, Reply, Streamed, Whole
from openai_api.chat_prompt import ChatPrompt, build_chat_prompt
from openai_api.chat_run import ChatRun, open_chat
from openai_api.openai_context import OpenAIContext
from openai_api.query import flag_in, number_in
from openai_api.request_body import read_body
from openai_api.responses.chat_of_items import chat_of, set_generation
from openai_api.responses.compaction import Compaction, compacted
from openai_api.responses.context_management import managed
from openai_api.responses.item_list import page_of
from openai_api.responses.item_references import new_response_id, with_items
from openai_api.responses.item_writer import Event
from openai_api.responses.offered_tools import OfferedTools
from openai_api.responses.response_run import ResponseRun, refused_stream
from openai_api.responses.response_store import StoredResponse
from openai_api.responses.truncation import Items, fitted
from openai_api.schemas.chat import ChatCompletionRequest, check_chat_request
from openai_api.schemas.responses import (
    COMPACT_DECODER,
    DECODER,
    ITEMS_DECODER,
    ItemsRequest,
    ResponseRequest,
    refuse_unsupported_items,
    tools_added_by,
)
from runtime.client.tenant import TENANT
from runtime.errors import HeadraceError, InvalidRequest, TooLong
from runtime.eventloop.heavy_work import aside
from runtime.requests.sampling_params import INT64_MAX
from runtime.service.generation import Chunk, joined, named_event


class UnknownResponse(HeadraceError):
    """The server has not stored a response with this id for this caller."""

    status_code = 404


async def create_response(call: Call, context: OpenAIContext) -> Reply:
    """Answer `POST /v1/responses`: make a response."""
    request = await read_body(call, DECODER)
    await aside(request, _check, request, context)
    response_id = new_response_id()
    try:
        with _wire_names():
            opened = await _open(response_id, request, context)
    except TooLong as error:
        if not request.stream or request.background:
            raise
        refused = refused_stream(response_id, request, error, context)
        return Streamed(_encoded(refused), lambda: None, end=b"")
    run = ResponseRun(
        response_id,
        request,
        opened.items,
        opened.tools,
        opened.run,
        context,
        opened.compaction,
    )
    if request.background:
        background = context.background_responses
        await background.start(run, is_streamed=bool(request.stream))
        if request.stream:
            return _followed(response_id, 0, context)
        return Whole(run.response)
    if request.stream:
        chunks = await opened.run.generation.begun()
        return Streamed(_encoded(run.streamed(chunks)), run.close, end=b"")
    return Whole(await run.whole())


@dataclass(frozen=True)
class _Opened:
    """A conversation whose samples are admitted.

    Attributes:
        items: the conversation's items.
        tools: the tools that the model may call.
        run: the admitted samples.
        compaction: the summary of earlier items, if one was made.
    """

    items: Items
    tools: OfferedTools
    run: ChatRun
    compaction: Compaction | None


async def _open(response_id: str, request: ResponseRequest, context: OpenAIContext) -> _Opened:
    items, tools = await _conversation(request, context)

    def make(some: list[dict[str, Any]]) -> ChatCompletionRequest:
        chat = chat_of(request, some, tools, sees=context.sees)
        set_generation(chat, request)
        chat.rid = response_id
        return chat

    prompt: ChatPrompt | None = None
    compaction: Compaction | None = None
    if request.context_management:
        items, prompt, compaction = await managed(request, items, make, context)
    whole = items if compaction is None else [*items, compaction.item]
    chat = await aside(whole, make, whole)
    if request.truncation == "auto" and prompt is None:
        chat, prompt = await fitted(make, whole, request.max_output_tokens or 1, context)
    run = await open_chat(chat, context, prompt=prompt)
    return _Opened(items, tools, run, compaction)


async def count_input_tokens(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /v1/responses/input_tokens`: count the tokens of a request's prompt."""
    chat = await prompt_of_response(await read_body(call, ITEMS_DECODER), context)
    with _wire_names():
        prompt = await build_chat_prompt(chat, context)
    return Whole({"object": "response.input_tokens", "input_tokens": len(prompt.input_ids)})


async def prompt_of_response(
    request: ItemsRequest, context: OpenAIContext
) -> ChatCompletionRequest:
    """Return the checked chat request that has the same prompt as `request`.

    Raises:
        InvalidRequest: the first error found.
    """
    await aside(request, refuse_unsupported_items, request)
    with _wire_names():
        items, tools = await _conversation(request, context)
        chat = await aside(items, chat_of, request, items, tools, sees=context.sees)
        await aside(chat, check_chat_request, chat)
    return chat


async def compact_response(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /v1/responses/compact`: summarise a conversation."""
    body = await read_body(call, COMPACT_DECODER)
    request = ItemsRequest(
        input=body.input or [],
        model=body.model,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
    )
    with _wire_names():
        items, _ = await _conversation(request, context)
        if not items:
            raise InvalidRequest("input cannot be empty.", param="input")
        return Whole(await compacted(request, items, context))


async def retrieve_response(call: Call, context: OpenAIContext) -> Reply:
    """Answer `GET /v1/responses/{response_id}`: return a stored response.

    With `stream`, return its events instead, from any event on.

    Raises:
        InvalidRequest: the events are not kept, or the query is wrong.
    """
    response_id = call.path["response_id"]
    stored = await _stored(response_id, context)
    after = number_in(call.query, "starting_after", 0, INT64_MAX)
    if flag_in(call.query, "stream"):
        return _followed(response_id, 0 if after is None else after + 1, context)
    if after is not None:
        raise InvalidRequest("starting_after needs stream.", param="starting_after")
    return Whole(context.background_responses.running(response_id) or stored.response)


async def list_input_items(call: Call, context: OpenAIContext) -> Whole:
    """Answer `GET /v1/responses/{response_id}/input_items`: list a response's input items."""
    stored = await _stored(call.path["response_id"], context)
    return Whole(page_of(stored.items, call.query))


async def delete_response(call: Call, context: OpenAIContext) -> Whole:
    """Answer `DELETE /v1/responses/{response_id}`: delete a stored response."""
    response_id = call.path["response_id"]
    await _stored(response_id, context)
    await context.background_responses.cancel(response_id)
    context.background_responses.logs.drop(response_id)
    if context.responses is not None:
        await context.responses.delete(response_id)
    return Whole({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(call: Call, context: OpenAIContext) -> Whole:
    """Answer `POST /v1/responses/{response_id}/cancel`: stop a response that runs in background.

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


def _followed(response_id: str, start: int, context: OpenAIContext) -> Streamed:
    events = context.background_responses.follow(response_id, start)
    if events is None:
        raise InvalidRequest(
            "The events of this response are not kept. Only the newest responses with background "
            "and stream have events; read it without stream.",
            param="stream",
        )
    # If the reader leaves, the response continues, so there is nothing to close.
    return Streamed(events, lambda: None, end=b"")


def _check(request: ResponseRequest, context: OpenAIContext) -> None:
    refuse_unsupported_items(request)
    if request.background and (request.store is False or context.responses is None):
        raise InvalidRequest("background needs store: the response is read later.", param="store")


async def _conversation(
    request: ItemsRequest, context: OpenAIContext
) -> tuple[list[dict[str, Any]], OfferedTools]:
    items: list[dict[str, Any]] = []
    if request.previous_response_id is not None:
        items = await _before(request.previous_response_id, context)
    if isinstance(request.input, str):
        items.append({"type": "message", "role": "user", "content": request.input})
    else:
        items += await with_items(request.input, partial(_own, context=context))
    return items, await aside((items, request.tools), _offered, items, request.tools or [])


def _offered(items: list[dict[str, Any]], tools: list[dict[str, Any]]) -> OfferedTools:
    added = [tool for item in items for tool in tools_added_by(item)]
    return OfferedTools.read([*tools, *added])


async def _before(response_id: str, context: OpenAIContext) -> list[dict[str, Any]]:
    stored = await _own(response_id, context)
    if stored is None:
        error = InvalidRequest(
            f"Previous response with id {response_id[:64]!r} not found. This server keeps "
            "the newest responses with store, for a day (--response-store-mb).",
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
    stored = await _own(response_id, context)
    if stored is None:
        raise UnknownResponse(f"Response with id {response_id[:64]!r} not found.")
    return stored


async def _own(response_id: str, context: OpenAIContext) -> StoredResponse | None:
    """Return the stored response with this id if the current tenant owns it, else None."""
    if context.responses is None:
        return None
    stored = await context.responses.get(response_id)
    return None if stored is None or stored.owner != TENANT.get() else stored


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[Chunk, None]:
    try:
        async for each in events:
            for ready in joined([named_event(each["type"], each)]):
                yield ready
    finally:
        await events.aclose()


@contextmanager
def _wire_names() -> Iterator[None]:
    """In errors that the block raises, replace chat's field names by those of the Responses API."""
    names = {"max_completion_tokens": "max_output_tokens", "messages": "input"}

    def renamed(text: str) -> str:
        text = re.sub(r"\.function\.(parameters|name|strict)\b", r".\1", text)
        return re.sub(r"\b(max_completion_tokens|messages)\b", lambda found: names[found[0]], text)

    try:
        yield
    except InvalidRequest as error:
        error.message, error.param = renamed(error.message), error.param and renamed(error.param)
        raise
