"""Converts items to the chat request that the rest of the server uses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai_api.call_arguments import told_text
from openai_api.content_parts import Content, image_part, joined, text_part
from openai_api.custom_tools import arguments_of
from openai_api.responses import local_shell
from openai_api.responses.offered_tools import OfferedTools
from openai_api.responses.opaque_text import unwrapped
from openai_api.schemas.chat import ChatCompletionRequest, ChatMessage, FunctionCall, ToolCall
from openai_api.schemas.chat import ContentPart as ChatPart
from openai_api.schemas.responses import (
    MAX_ITEMS,
    AdditionalToolsItem,
    CallOutputItem,
    CompactionItem,
    ContentPart,
    CustomCallItem,
    FunctionCallItem,
    HostedItem,
    Item,
    ItemsRequest,
    MessageItem,
    ReasoningItem,
    ResponseRequest,
    ShellCallItem,
    ShellOutputItem,
    TextFormat,
    read_item,
)
from runtime.errors import InvalidRequest

# This text is put before the summary of a compacted conversation.
SUMMARY = "Summary of the conversation before:"
LOGPROBS = "message.output_text.logprobs"
THOUGHTS = "reasoning.encrypted_content"
_SAME_NAMES = (
    *("stream", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "priority"),
    *("frequency_penalty", "presence_penalty", "cache_salt", "extra_key", "return_cache_break"),
)


def chat_of(
    request: ItemsRequest, items: Sequence[dict[str, Any]], tools: OfferedTools, *, sees: bool
) -> ChatCompletionRequest:
    """Build the chat whose prompt is `items`.

    Args:
        request: the other fields.
        items: the whole conversation, including earlier turns.
        tools: the tools of the request.
        sees: whether the model takes images.

    Raises:
        InvalidRequest: a part that chat cannot represent; the message names its place.
    """
    if len(items) > MAX_ITEMS:
        raise InvalidRequest(f"input may have at most {MAX_ITEMS} items.", param="input")
    turns = _Turns(tools, sees)
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
        enable_thinking=request.enable_thinking,
        thinking=request.thinking,
        documents=request.documents,
        chat_template_kwargs=request.chat_template_kwargs,
    )
    chat.tools = tools.functions or None
    if request.reasoning is not None:
        chat.reasoning_effort = request.reasoning.effort
    if request.text is not None:
        if request.text.format is not None:
            chat.response_format = _response_format(request.text.format)
        if request.text.verbosity is not None:
            # Some templates use this value.
            variables = chat.chat_template_kwargs or {}
            chat.chat_template_kwargs = {"verbosity": request.text.verbosity, **variables}
    return chat


def set_generation(chat: ChatCompletionRequest, request: ResponseRequest) -> None:
    """Copy the generation fields of `request` to `chat`."""
    for name in _SAME_NAMES:
        setattr(chat, name, getattr(request, name))
    chat.max_completion_tokens = request.max_output_tokens
    if LOGPROBS in (request.include or ()) or request.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs


class _Turns:
    """Messages for chat templates: consecutive items of the assistant become one message."""

    def __init__(self, tools: OfferedTools, sees: bool) -> None:
        self.messages: list[ChatMessage] = []
        self._tools = tools
        self._sees = sees

    def add(self, item: Item, where: str) -> None:
        match item:
            case MessageItem(role="assistant"):
                message = self._assistant()
                said = _content(item.content, where, sees=False)
                assert isinstance(said, str), "texts alone are one text"
                message.content = f"{message.content}\n{said}" if message.content else said
            case MessageItem():
                content = _content(item.content, where, sees=self._sees)
                self.messages.append(ChatMessage(role=item.role, content=content))
            case FunctionCallItem():
                name = self._tools.name_in_chat(item.name, item.namespace)
                self._call(item.call_id, name, item.arguments)
            case CustomCallItem():
                name = self._tools.name_in_chat(item.name, item.namespace)
                self._call(item.call_id, name, dict(arguments_of(told_text(item.input))))
            case CallOutputItem():
                self._returned(item.call_id, _content(item.output, where, sees=self._sees))
            case ShellCallItem():
                self._call(item.call_id, local_shell.NAME, local_shell.arguments_of(item.action))
            case ShellOutputItem():
                self._returned(item.id, item.output)
            case CompactionItem():
                self.messages.append(ChatMessage(role="user", content=_summary(item, where)))
            case AdditionalToolsItem() | HostedItem():
                # Its tools are already among the others. Chat cannot represent items of OpenAI's
                # hosted tools.
                pass
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

    def _returned(self, call_id: str, content: Content) -> None:
        self.messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=content))

    def _call(self, call_id: str, name: str, arguments: Any) -> None:
        message = self._assistant()
        call = ToolCall(
            id=call_id, type="function", function=FunctionCall(name=name, arguments=arguments)
        )
        message.tool_calls = message.tool_calls or []
        message.tool_calls.append(call)

    def _assistant(self) -> ChatMessage:
        if not self.messages or self.messages[-1].role != "assistant":
            self.messages.append(ChatMessage(role="assistant"))
        return self.messages[-1]


def _content(content: str | list[ContentPart], where: str, *, sees: bool) -> Content:
    if isinstance(content, str):
        return content
    return joined(
        [_part(part, f"{where}.content[{at}]", sees=sees) for at, part in enumerate(content)]
    )


def _part(part: ContentPart, where: str, *, sees: bool) -> ChatPart:
    if part.type == "input_image":
        return image_part(part.image_url, where, sees=sees)
    text = part.refusal if part.type == "refusal" else part.text
    if text is None or part.type not in ("input_text", "output_text", "text", "refusal"):
        takes = "text and images (input_image) only" if sees else "text only"
        raise InvalidRequest(f"{where}: this model takes {takes}.", param=where)
    return text_part(text)


def _thought(item: ReasoningItem) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    kept = unwrapped("thought", item.encrypted_content or "")
    # This server cannot read another server's encrypted content.
    return "\n".join(part.text for part in item.summary) if kept is None else kept


def _summary(item: CompactionItem, where: str) -> str:
    kept = unwrapped("summary", item.encrypted_content)
    if kept is None:
        raise InvalidRequest(
            f"{where}: this summary was not made by this server, which cannot read it.",
            param=f"{where}.encrypted_content",
        )
    return f"{SUMMARY}\n{kept}"


def _response_format(form: TextFormat) -> dict[str, Any]:
    described: dict[str, Any] = {"type": form.type}
    if form.type == "json_schema":
        described["json_schema"] = {"name": form.name or "answer", "schema": form.schema}
    return described
