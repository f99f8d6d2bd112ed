"""`context_management`: compacts a conversation that is too long before it is answered."""

from __future__ import annotations

from openai_api.chat_prompt import ChatPrompt
from openai_api.openai_context import OpenAIContext
from openai_api.responses.compaction import Compaction, NoSummary, spoken, summarised
from openai_api.responses.truncation import Items, MakeChat, prompt_within
from openai_api.schemas.responses import ResponseRequest
from runtime.errors import TooLong
from runtime.eventloop.heavy_work import aside

# Roles of the messages that stay when a summary replaces the conversation.
_KEPT_ROLES = ("user", "system", "developer")


async def managed(
    request: ResponseRequest, items: Items, make: MakeChat, context: OpenAIContext
) -> tuple[Items, ChatPrompt | None, Compaction | None]:
    """Compact a conversation if its prompt has more tokens than the request's threshold.

    Args:
        request: the request, with `context_management`.
        items: the whole conversation.
        make: makes the chat request of some items.
        context: the server's context.

    Returns:
        The conversation; its prompt, if it was not compacted; and the summary, if it was. A
        compacted conversation has only the messages of users and system, and the summary belongs
        after it.
    """
    items = _since_summary(items)
    chat = await aside(items, make, items)
    prompt = await prompt_within(chat, _threshold(request, context), context)
    if prompt is not None:
        return items, prompt, None
    try:
        made = await summarised(request, items, context, namespace_of=request)
    except (NoSummary, TooLong):
        # The conversation is left as it is: an answer may still be possible.
        return items, None, None
    return spoken(items, _KEPT_ROLES), None, made


def _threshold(request: ResponseRequest, context: OpenAIContext) -> int:
    """Return the threshold in tokens: the request's, or two thirds of the context."""
    given = [each.compact_threshold for each in request.context_management or ()]
    most = context.service.client.limits.max_req_len
    return min([each for each in given if each is not None], default=most * 2 // 3)


def _since_summary(items: Items) -> Items:
    """Drop the items that the last summary in `items` replaces, if a client still sends them."""
    places = [at for at, item in enumerate(items) if item.get("type") == "compaction"]
    if not places:
        return items
    return [*spoken(items[: places[-1]], _KEPT_ROLES), *items[places[-1] :]]
