"""`/v1/responses/compact`: a long conversation becomes its users' words and a summary."""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Any

from openai_api.chat_run import ChatRun, open_chat
from openai_api.openai_context import OpenAIContext
from openai_api.output_parser import ContentText
from openai_api.responses.chat_of_items import chat_of
from openai_api.responses.item_list import listed
from openai_api.responses.offered_tools import OfferedTools
from openai_api.responses.opaque_text import wrapped
from openai_api.responses.response_run import usage_of_response
from openai_api.responses.truncation import Items, fitted
from openai_api.schemas.chat import ChatCompletionRequest
from openai_api.schemas.responses import ItemsRequest
from runtime.errors import HeadraceError

MAX_SUMMARY_TOKENS = 4096
_ASK = (
    "Stop here, and write a summary of this conversation for someone who goes on with it and has "
    "read none of it: what was asked for, what was found out and done, which files and names "
    "matter, what is left to do. Write the summary only."
)


class NoSummary(HeadraceError):
    """The model has written nothing that could stand for the conversation."""


async def compacted(request: ItemsRequest, items: Items, context: OpenAIContext) -> dict[str, Any]:
    """Have the model summarise a conversation.

    Args:
        request: whose conversation it is.
        items: all of it.
        context: the server's.

    Raises:
        InvalidRequest: the conversation is malformed, or not even its end fits the context.
        NoSummary: the model said nothing.
    """
    tools = OfferedTools()
    limits = context.service.client.limits
    num_output = min(MAX_SUMMARY_TOKENS, max(limits.max_req_len // 4, 1))

    def make(some: Items) -> ChatCompletionRequest:
        asked = {"type": "message", "role": "user", "content": _ASK}
        chat = chat_of(request, [*some, asked], tools, sees=context.sees)
        chat.max_completion_tokens = num_output
        return chat

    chat, prompt = await fitted(make, items, num_output, context)
    run = await open_chat(chat, context, "resp", prompt)
    summary = await _text(run)
    if not summary:
        raise NoSummary("The model wrote no summary of the conversation.")
    item = {
        "id": f"cmp_{secrets.token_hex(24)}",
        "type": "compaction",
        "encrypted_content": wrapped("summary", summary),
    }
    said = [each for each in listed(items) if each["type"] == "message" and each["role"] == "user"]
    return {
        "id": run.id.replace("-", "_", 1),
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*said, item],
        "usage": usage_of_response(run.choices[0].count, context),
    }


async def _text(run: ChatRun) -> str:
    texts: list[str] = []
    async with contextlib.aclosing(run.chunks()) as chunks:
        async for _, chunk in chunks:
            outputs = run.choices[0].read(chunk)
            texts += [each.text for each in outputs if isinstance(each, ContentText)]
    return "".join(texts).strip()
