"""`truncation: auto`: drops the oldest items of a conversation that is too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from openai_api.chat_prompt import ChatPrompt, build_chat_prompt
from openai_api.openai_context import OpenAIContext
from openai_api.schemas.chat import ChatCompletionRequest, check_chat_request
from runtime.errors import TooLong
from runtime.eventloop.heavy_work import aside

Items = list[dict[str, Any]]
MakeChat = Callable[[Items], ChatCompletionRequest]


async def fitted(
    make: MakeChat, items: Items, num_output: int, context: OpenAIContext
) -> tuple[ChatCompletionRequest, ChatPrompt | None]:
    """Return the chat request of as many of the newest items as fit, and its prompt.

    The system messages at the beginning always stay. A result is never kept without its call.

    Args:
        make: makes the chat request of some items.
        items: the whole conversation.
        num_output: number of tokens that must fit after the prompt.
        context: the server's context.

    Returns:
        The chat request and its prompt. If not even the newest items fit, the chat request of all
        items and None.
    """
    room = context.service.client.limits.max_req_len - num_output
    whole = await aside(items, make, items)
    prompt = await prompt_within(whole, room, context)
    if prompt is not None:
        return whole, prompt
    head, starts = await aside(items, _starts, items)
    found: tuple[ChatCompletionRequest, ChatPrompt | None] = (whole, None)
    # A binary search for the earliest start that fits, because rendering a prompt is expensive.
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        some = items[:head] + items[starts[middle] :]
        chat = await aside(some, make, some)
        prompt = await prompt_within(chat, room, context)
        if prompt is None:
            low = middle + 1
        else:
            found, high = (chat, prompt), middle
    return found


async def prompt_within(
    chat: ChatCompletionRequest, room: int, context: OpenAIContext
) -> ChatPrompt | None:
    """Return the prompt of a chat request; `None` if it has more than `room` tokens."""
    await aside(chat, check_chat_request, chat)
    try:
        prompt = await build_chat_prompt(chat, context)
    except TooLong:
        return None
    return prompt if len(prompt.input_ids) <= room else None


def _starts(items: Sequence[dict[str, Any]]) -> tuple[int, list[int]]:
    """Return how many items at the beginning always stay, and where the kept rest may begin."""
    head = 0
    while head < len(items) and items[head].get("role") in ("system", "developer"):
        head += 1
    starts = []
    pending: set[str] = set()
    for index in range(head, len(items)):
        if not pending and index > head:
            starts.append(index)
        item = items[index]
        kind = str(item.get("type"))
        call_id = item.get("call_id")
        if kind.endswith("_call") and isinstance(call_id, str):
            pending.add(call_id)
        elif kind.endswith("_output"):
            pending.discard(str(item["id"] if call_id is None and "id" in item else call_id))
    return head, starts
