"""`context_management`: a conversation that has become long is compacted before its answer."""

from __future__ import annotations

from openai_api.chat_prompt import ChatPrompt
from openai_api.openai_context import OpenAIContext
from openai_api.responses.compaction import Compaction, NoSummary, spoken, summarised
from openai_api.responses.truncation import Items, MakeChat, prompt_within
from openai_api.schemas.responses import ResponseRequest
from runtime.errors import TooLong
from runtime.eventloop.heavy_work import aside

# What stays of what a summary stands for.
_KEPT_ROLES = ("user", "system", "developer")


async def managed(
    request: ResponseRequest, items: Items, make: MakeChat, context: OpenAIContext
) -> tuple[Items, ChatPrompt | None, Compaction | None]:
    """Compact a conversation whose prompt has more tokens than the request's threshold.

    Args:
        request: whose conversation it is, with `context_management`.
        items: all of it.
        make: the chat of some items.
        context: the server's.

    Returns:
        The conversation, its prompt where that is known, and the summary that was made: it stands
        behind the conversation, which is then what users and the system said.
    """
    items = _since_summary(items)
    chat = await aside(items, make, items)
    prompt = await prompt_within(chat, _threshold(request, context), context)
    if prompt is not None:
        return items, prompt, None
    try:
        made = await summarised(request, items, context, namespace_of=request)
    except (NoSummary, TooLong):
        # An answer may come all the same.
        return items, None, None
    return spoken(items, _KEPT_ROLES), None, made


def _threshold(request: ResponseRequest, context: OpenAIContext) -> int:
    """Tokens of a prompt that is long: two thirds of what fits, unless the request says it."""
    given = [each.compact_threshold for each in request.context_management or ()]
    most = context.service.client.limits.max_req_len
    return min([each for each in given if each is not None], default=most * 2 // 3)


def _since_summary(items: Items) -> Items:
    """What the last summary stands for is left out: clients may send it all the same."""
    places = [at for at, item in enumerate(items) if item.get("type") == "compaction"]
    if not places:
        return items
    return [*spoken(items[: places[-1]], _KEPT_ROLES), *items[places[-1] :]]
