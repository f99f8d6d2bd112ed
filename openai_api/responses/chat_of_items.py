"""Items become the chat request that the rest of the server knows."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Any

import orjson

from openai_api.custom_tools import arguments_of
from openai_api.responses.offered_tools import OfferedTools
from openai_api.schemas.chat import ChatCompletionRequest, ChatMessage, FunctionCall, ToolCall
from openai_api.schemas.responses import (
    MAX_ITEMS,
    CallOutputItem,
    ContentPart,
    CustomCallItem,
    FunctionCallItem,
    Item,
    ItemsRequest,
    MessageItem,
    ReasoningItem,
    ResponseRequest,
    TextFormat,
    read_item,
)
from runtime.errors import InvalidRequest

# In front of the text of a thought that a client keeps for us: not a secret, only opaque.
_THOUGHT = b"headrace-thought:"
LOGPROBS = "message.output_text.logprobs"
THOUGHTS = "reasoning.encrypted_content"
_SAME_NAMES = (
    *("stream", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "priority"),
    *("frequency_penalty", "presence_penalty", "cache_salt", "extra_key"),
)


def chat_of(
    request: ItemsRequest, items: Sequence[dict[str, Any]], tools: OfferedTools
) -> ChatCompletionRequest:
    """The chat that has `items` for its prompt.

    Args:
        request: what else is asked for.
        items: the whole conversation, of earlier turns too.
        tools: of the request.

    Raises:
        InvalidRequest: something that no chat can carry, named by its place.
    """
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(f"input may have at most {MAX_ITEMS} items.", param="input")
    turns = _Turns(tools)
    if request.instructions:
        turns.messages.append(ChatMessage(role="system", content=request.instructions))
    for index, item in enumerate(items):
        turns.add(read_item(item, f"input[{index}]"), f"input[{index}]")
    if not any(message.role != "system" for message in turns.messages) and not items:
        raise InvalidRequest("input cannot be empty.", param="input")
    chat = ChatCompletionRequest(
        model=request.model,
        messages=turns.messages,
        tool_choice=tools.choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    chat.tools = tools.functions or None
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        chat.response_format = _response_format(request.text.format)
    return chat


def set_generation(chat: ChatCompletionRequest, request: ResponseRequest) -> None:
    """Let `chat` be answered as `request` says."""
    for name in _SAME_NAMES:
        setattr(chat, name, getattr(request, name))
    chat.max_completion_tokens = request.max_output_tokens
    if LOGPROBS in (request.include or ()) or request.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs


def keepable(thought: str) -> str:
    """A thought as clients keep it for us."""
    return base64.b64encode(_THOUGHT + thought.encode("utf-8", "surrogatepass")).decode()


class _Turns:
    """Messages as chat templates want them: what the assistant did in a row is one of them."""

    def __init__(self, tools: OfferedTools) -> None:
        self.messages: list[ChatMessage] = []
        self._tools = tools

    def add(self, item: Item, where: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                message = self._assistant()
                text = _text(item.content, where)
                message.content = f"{message.content}\n{text}" if message.content else text
            case MessageItem():
                text = _text(item.content, where)
                self.messages.append(ChatMessage(role=item.role, content=text))
            case FunctionCallItem():
                name = self._tools.name_in_chat(item.name, item.namespace)
                self._call(item.call_id, name, item.arguments)
            case CustomCallItem():
                self._call(item.call_id, item.name, orjson.dumps(arguments_of(item.input)).decode())
            case CallOutputItem():
                text = _text(item.output, where)
                self.messages.append(
                    ChatMessage(role="tool", tool_call_id=item.call_id, content=text)
                )
            case ReasoningItem():
                thought = _thought(item)
                if thought:
                    self._assistant().reasoning_content = thought
            case _:
                raise InvalidRequest(
                    f"{where}: items are not kept by their ids; send the item itself, or "
                    "previous_response_id.",
                    param=where,
                )

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        message = self._assistant()
        call = ToolCall(
            id=call_id, type="function", function=FunctionCall(name=name, arguments=arguments)
        )
        message.tool_calls = [*(message.tool_calls or ()), call]

    def _assistant(self) -> ChatMessage:
        if not self.messages or self.messages[-1].role != "assistant":
            self.messages.append(ChatMessage(role="assistant"))
        return self.messages[-1]


def _text(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None or part.type not in ("input_text", "output_text", "text", "refusal"):
            place = f"{where}.content[{index}]"
            raise InvalidRequest(f"{place}: this model takes text only.", param=place)
        texts.append(text)
    return "\n".join(texts)


def _thought(item: ReasoningItem) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    try:
        kept = base64.b64decode(item.encrypted_content or "", validate=True)
    except (binascii.Error, ValueError):
        kept = b""
    if kept.startswith(_THOUGHT):
        return kept.removeprefix(_THOUGHT).decode("utf-8", "replace")
    # Another server's, which nobody here can read.
    return "\n".join(part.text for part in item.summary)


def _response_format(form: TextFormat) -> dict[str, Any]:
    described: dict[str, Any] = {"type": form.type}
    if form.type == "json_schema":
        described["json_schema"] = {"name": form.name or "answer", "schema": form.schema}
    return described
