"""`/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import msgspec

from anthropic_api.conversation import chat_request, prompt_request
from anthropic_api.message_answers import (
    MessageAnswer,
    MessageEnd,
    MessageUsage,
    StopReason,
    TokenTotal,
)
from anthropic_api.message_blocks import BlockWriter, whole_blocks
from anthropic_api.message_request import CountTokensRequest, MessagesRequest
from anthropic_api.named_events import message_event
from openai_api.aborted import ended
from openai_api.call import Call, Reply, Streamed, Whole
from openai_api.chat_choice import ChatChoice
from openai_api.chat_prompt import build_chat_prompt
from openai_api.chat_run import ChatRun, open_chat
from openai_api.openai_context import OpenAIContext
from openai_api.output_parser import OutputEvent
from openai_api.request_body import read_body
from openai_api.schemas.chat import check_chat_request
from openai_api.thinking import keeps_budget
from runtime.errors import InvalidRequest, TooLong
from runtime.eventloop.heavy_work import aside
from runtime.service.generation import Chunk, Indexed, joined

_MESSAGES = msgspec.json.Decoder(MessagesRequest)
# Anthropic sends a ping after the first event. Clients use it as a keep-alive.
_PING = message_event({"type": "ping"})
_COUNT = msgspec.json.Decoder(CountTokensRequest)


async def create_message(call: Call, context: OpenAIContext) -> Reply:
    """Answer `POST /v1/messages`."""
    body = await read_body(call, _MESSAGES)
    with _wire_names():
        chat = await aside(body, chat_request, body, sees=context.sees)
        if body.thinking is not None and keeps_budget(chat, context):
            # Agents send a budget to every model; if it cannot be enforced, it is ignored.
            chat.max_thinking_tokens = body.thinking.budget_tokens
        run = await open_chat(chat, context, "msg", cuts_output=True)
    hides = body.thinking is not None and body.thinking.display == "omitted"
    if body.stream:
        writer = BlockWriter(hides_thoughts=hides)
        events = _events(body, run, await run.generation.begun(), writer, context)
        return Streamed(events, run.generation.close, end=b"")
    choice = run.choices[0]
    outputs: list[OutputEvent] = []
    async with contextlib.aclosing(run.generation.chunks()) as chunks:
        async for _, chunk in chunks:
            outputs += choice.read(chunk)
    message = _message(body.model, run, context)
    message["content"] = whole_blocks(outputs, BlockWriter(hides_thoughts=hides))
    ended = _end(choice, body.max_tokens)
    message["stop_reason"], message["stop_sequence"] = ended["stop_reason"], ended["stop_sequence"]
    return Whole(message)


async def count_tokens(call: Call, context: OpenAIContext) -> Reply:
    """Answer `POST /v1/messages/count_tokens`."""
    body = await read_body(call, _COUNT)
    with _wire_names():
        request = await aside(body, prompt_request, body, sees=context.sees)
        await aside(request, check_chat_request, request)
        prompt = await build_chat_prompt(request, context)
    total: TokenTotal = {"input_tokens": len(prompt.input_ids)}
    return Whole(total)


async def _events(
    body: MessagesRequest,
    run: ChatRun,
    chunks: AsyncGenerator[Indexed, None],
    writer: BlockWriter,
    context: OpenAIContext,
) -> AsyncGenerator[Chunk, None]:
    choice, is_first = run.choices[0], True
    async with contextlib.aclosing(chunks):
        async for _, chunk in chunks:
            outputs = choice.read(chunk)
            events = []
            if is_first:
                is_first = False
                start = _message(body.model, run, context)
                events = [message_event({"type": "message_start", "message": start}), _PING]
            events += map(message_event, writer.feed(outputs))
            for ready in joined(events):
                yield ready
    end, usage = _end(choice, body.max_tokens), _usage(choice, context)
    for ready in joined(
        [
            *map(message_event, writer.finish()),
            message_event({"type": "message_delta", "delta": end, "usage": usage}),
            message_event({"type": "message_stop"}),
        ]
    ):
        yield ready


def _message(model: str, run: ChatRun, context: OpenAIContext) -> MessageAnswer:
    """Return the message of an answer, still without content."""
    return {
        "id": run.id.replace("-", "_", 1),
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(run.choices[0], context),
    }


def _end(choice: ChatChoice, max_tokens: int) -> MessageEnd:
    """Return the reason why the answer ended.

    Args:
        choice: the answer.
        max_tokens: the requested limit; fewer tokens may fit into the context.

    Raises:
        Aborted: the answer is not complete.
    """
    reason = ended(choice.reason)
    word: StopReason = "end_turn"
    if reason.type == "length":
        is_asked_for = choice.count.completion >= max_tokens
        word = "max_tokens" if is_asked_for else "model_context_window_exceeded"
    matched = reason.matched if isinstance(reason.matched, str) else None
    if reason.type == "stop" and choice.parser.num_calls:
        word, matched = "tool_use", None
    elif matched is not None:
        word = "stop_sequence"
    return {"stop_reason": word, "stop_sequence": matched}


def _usage(choice: ChatChoice, context: OpenAIContext) -> MessageUsage:
    count = choice.count
    cached = count.cached if context.service.config.http.enable_cache_report else 0
    usage: MessageUsage = {
        "input_tokens": count.prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": count.completion,
        "output_tokens_details": {"thinking_tokens": count.reasoning if count.has_reasoned else 0},
    }
    if count.cache_break is not None:
        usage["cache_break"] = count.cache_break
    return usage


@contextmanager
def _wire_names() -> Iterator[None]:
    """In errors that the block raises, replace chat's field names by those of the Messages API."""

    def renamed(text: str) -> str:
        return re.sub(r"\.function\.parameters\b", ".input_schema", text)

    try:
        yield
    except TooLong as error:
        # Agents match these words, and then shorten their conversation.
        raise TooLong(f"prompt is too long: {error.message}", param="messages") from None
    except InvalidRequest as error:
        param = "stop_sequences" if error.param == "stop" else error.param
        message = renamed(error.message)
        raise type(error)(message, param=param and renamed(param)) from None
