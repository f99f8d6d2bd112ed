"""`/v1/responses/compact`: replaces a long conversation by its user messages and a summary."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai_api.chat_run import ChatRun, open_chat
from openai_api.openai_context import OpenAIContext
from openai_api.output_parser import ContentText, ReasoningText
from openai_api.responses.chat_of_items import chat_of
from openai_api.responses.item_list import listed
from openai_api.responses.item_references import new_response_id
from openai_api.responses.offered_tools import OfferedTools
from openai_api.responses.opaque_text import wrapped
from openai_api.responses.response_usage import usage_of_response
from openai_api.responses.truncation import Items, fitted
from openai_api.schemas.chat import ChatCompletionRequest
from openai_api.schemas.responses import ItemsRequest, ResponseRequest, kind_of
from openai_api.usage import TokenCount
from runtime.errors import HeadraceError

MAX_SUMMARY_TOKENS = 4096
_ASK = (
    "Stop here, and write a summary of this conversation for someone who goes on with it and has "
    "read none of it: what was asked for, what was found out and done, which files and names "
    "matter, what is left to do. Write the summary only."
)


class NoSummary(HeadraceError):
    """The model wrote no text for the summary.

    Attributes:
        count: token counts of the request that was to make the summary.
    """

    def __init__(self, count: TokenCount) -> None:
        """Create the error for a request with these token counts."""
        super().__init__("The model wrote no summary of the conversation.")
        self.count = count


@dataclass(frozen=True)
class Compaction:
    """A summary of a conversation.

    Attributes:
        item: the item with the summary, which the client sends back instead of the conversation.
        count: token counts of the request that made the summary.
    """

    item: dict[str, Any]
    count: TokenCount


async def compacted(request: ItemsRequest, items: Items, context: OpenAIContext) -> dict[str, Any]:
    """Return the answer of `/v1/responses/compact`.

    If the model writes no summary, the answer has the whole conversation: the client continues with
    the answer's items in either case, so nothing is lost.

    Args:
        request: the request.
        items: the whole conversation.
        context: the server's context.

    Raises:
        InvalidRequest: the conversation is malformed, or not even its end fits the context.
    """
    try:
        made = await summarised(request, items, context)
    except NoSummary as error:
        output, count = [*listed(items)], error.count
    else:
        output, count = [*listed(spoken(items, ("user",))), made.item], made.count
    return {
        "id": new_response_id(),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": output,
        "usage": usage_of_response(count, context),
    }


def spoken(items: Items, roles: Sequence[str]) -> Items:
    """Return the messages of a conversation whose role is one of `roles`."""
    messages = (each for each in items if kind_of(each) == "message")
    return [each for each in messages if each.get("role") in roles]


async def summarised(
    request: ItemsRequest,
    items: Items,
    context: OpenAIContext,
    namespace_of: ResponseRequest | None = None,
) -> Compaction:
    """Let the model write a summary of a conversation.

    Args:
        request: the request.
        items: the whole conversation.
        context: the server's context.
        namespace_of: the request that sets the cache namespace and the priority, if any.

    Raises:
        InvalidRequest: the conversation is malformed, or not even its end fits the context.
        NoSummary: the model wrote no text.
    """
    # The request's constraint and tools are left out, because they are about the answer.
    plain = ItemsRequest(input=[], model=request.model, instructions=request.instructions)
    tools = OfferedTools()
    limits = context.service.client.limits
    num_output = min(MAX_SUMMARY_TOKENS, max(limits.max_req_len // 4, 1))

    def make(some: Items) -> ChatCompletionRequest:
        asked = {"type": "message", "role": "user", "content": _ASK}
        chat = chat_of(plain, [*some, asked], tools, sees=context.sees)
        chat.max_completion_tokens = num_output
        if namespace_of is not None:
            chat.cache_salt, chat.extra_key = namespace_of.cache_salt, namespace_of.extra_key
            chat.priority = namespace_of.priority
        return chat

    chat, prompt = await fitted(make, items, num_output, context)
    run = await open_chat(chat, context, "resp", prompt)
    summary = await _text(run)
    if not summary:
        raise NoSummary(run.choices[0].count)
    item = {
        "id": f"cmp_{secrets.token_hex(24)}",
        "type": "compaction",
        "encrypted_content": wrapped("summary", summary),
    }
    return Compaction(item, run.choices[0].count)


async def _text(run: ChatRun) -> str:
    """Return the model's text, or its thoughts if it wrote nothing else within the limit."""
    texts: list[str] = []
    thoughts: list[str] = []
    async with contextlib.aclosing(run.generation.chunks()) as chunks:
        async for _, chunk in chunks:
            for each in run.choices[0].read(chunk):
                if isinstance(each, ContentText):
                    texts.append(each.text)
                elif isinstance(each, ReasoningText):
                    thoughts.append(each.text)
    return "".join(texts).strip() or "".join(thoughts).strip()
