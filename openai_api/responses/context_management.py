"""`context_management` compacts a long conversation before it is answered."""

from __future__ import annotations

from openai_api.chat_prompt import ChatPrompt
from openai_api.openai_context import OpenAIContext
from openai_api.responses.compaction import Compaction, NoSummary, spoken, summarised
from openai_api.responses.truncation import Items, MakeChat, prompt_within
from openai_api.schemas.responses import ResponseRequest
from runtime.errors import TooLong
from runtime.eventloop.heavy_work import aside

# Messages of these roles stay when a summary replaces the conversation.
_KEPT_ROLES = ("user", "system", "developer")


async def managed(
    request: ResponseRequest, items: Items, make: MakeChat, context: OpenAIContext
) -> tuple[Items, ChatPrompt | None, Compaction | None]:
    """Compact a conversation whose prompt has more tokens than the request's threshold.

    Args:
        request: the request, with `context_management`.
        items: the whole conversation.
        make: function that makes the chat of some items.
        context: the server's context.

    Returns:
        The conversation, its prompt if known, and the summary if one was made. With a summary, the
        conversation holds only the users' and the system's messages, and the summary comes after
        it.
    """
    items = _since_summary(items)
    chat = await aside(items, make, items)
    prompt = await prompt_within(chat, _threshold(request, context), context)
    if prompt is not None:
        return items, prompt, None
    try:
        made = await summarised(request, items, context, namespace_of=request)
    except (NoSummary, TooLong):
        # Without a summary an answer may still be possible.
        return items, None, None
    return spoken(items, _KEPT_ROLES), None, made


def _threshold(request: ResponseRequest, context: OpenAIContext) -> int:
    """Return the most tokens of an uncompacted prompt: the request's, or 2/3 of the context."""
    given = [each.compact_threshold for each in request.context_management or ()]
    most = context.service.client.limits.max_req_len
    return min([each for each in given if each is not None], default=most * 2 // 3)


def _since_summary(items: Items) -> Items:
    """Drop the items that the last summary replaces: clients may still send them."""
    places = [at for at, item in enumerate(items) if item.get("type") == "compaction"]
    if not places:
        return items
    return [*spoken(items[: places[-1]], _KEPT_ROLES), *items[places[-1] :]]
