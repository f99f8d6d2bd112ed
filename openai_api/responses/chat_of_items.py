"""Converts the items of a Responses request to a chat request, which the rest of the code uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from openai_api.call_arguments import arguments_text, told_text
from openai_api.content_parts import Content, image_part, joined, note, text_part
from openai_api.custom_tools import arguments_of
from openai_api.responses import local_shell
from openai_api.responses.offered_tools import OfferedTools
from openai_api.responses.opaque_text import unwrapped
from openai_api.responses.shown_items import function_of, hosted_text, output_text
from openai_api.schemas.chat import ChatCompletionRequest, ChatMessage, FunctionCall, ToolCall
from openai_api.schemas.chat import ContentPart as ChatPart
from openai_api.schemas.responses import (
    AdditionalToolsItem,
    CallOutputItem,
    ClientCallItem,
    ClientOutputItem,
    CompactionItem,
    ConfigurationItem,
    ContentPart,
    CustomCallItem,
    FunctionCallItem,
    HostedItem,
    Item,
    ItemsRequest,
    MessageItem,
    ReasoningConfig,
    ReasoningItem,
    ResponseRequest,
    ShellCallItem,
    ShellOutputItem,
    TextConfig,
    TextFormat,
    check_num_items,
    read_item,
)
from runtime.errors import InvalidRequest

# The text before the summary of a compacted conversation.
SUMMARY = "Summary of the conversation before:"
_NO_TRIGGER = (
    "compaction_trigger is not supported; POST /v1/responses/compact, or context_management, "
    "makes a summary."
)
_TEXTS = ("input_text", "output_text", "text", "refusal")
LOGPROBS = "message.output_text.logprobs"
THOUGHTS = "reasoning.encrypted_content"
_SAME_NAMES = (
    *("stream", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "priority"),
    *("frequency_penalty", "presence_penalty", "cache_salt", "extra_key", "return_cache_break"),
)


def chat_of(
    request: ItemsRequest, items: Sequence[dict[str, Any]], tools: OfferedTools, *, sees: bool
) -> ChatCompletionRequest:
    """Return the chat request whose prompt shows the conversation `items`.

    Args:
        request: the request, of which all fields except the input are used.
        items: the whole conversation, including earlier turns.
        tools: the tools of the request.
        sees: whether the model takes images.

    Raises:
        InvalidRequest: chat cannot represent a part of an item; the message has the part's path.
    """
    check_num_items(len(items))
    turns = _Turns(tools, sees)
    if request.instructions:
        turns.messages.append(ChatMessage(role="system", content=request.instructions))
    for index, item in enumerate(items):
        where = f"input[{index}]"
        turns.add(read_item(item, where), item, where)
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
    for reasoning in (request.reasoning, turns.reasoning):
        if reasoning is not None and reasoning.effort is not None:
            chat.reasoning_effort = reasoning.effort
    if request.text is not None and request.text.verbosity is not None:
        # Some chat templates read this variable.
        variables = chat.chat_template_kwargs or {}
        chat.chat_template_kwargs = {"verbosity": request.text.verbosity, **variables}
    for text in (request.text, turns.text):
        if text is not None and text.format is not None:
            chat.response_format = _response_format(text.format)
    return chat


def set_generation(chat: ChatCompletionRequest, request: ResponseRequest) -> None:
    """Copy the fields about generation from `request` to `chat`."""
    for name in _SAME_NAMES:
        setattr(chat, name, getattr(request, name))
    chat.max_completion_tokens = request.max_output_tokens
    if LOGPROBS in (request.include or ()) or request.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, request.top_logprobs


class _Turns:
    """Collects chat messages: consecutive items of the assistant become one message."""

    def __init__(self, tools: OfferedTools, sees: bool) -> None:
        self.messages: list[ChatMessage] = []
        self.reasoning: ReasoningConfig | None = None
        self.text: TextConfig | None = None
        self._tools = tools
        self._sees = sees

    def add(self, item: Item, raw: Mapping[str, Any], where: str) -> None:
        """Add an item.

        Args:
            item: the decoded item.
            raw: the item as it was sent.
            where: its path in the request, for errors.
        """
        match item:
            case MessageItem():
                self._add_message(item, f"{where}.content")
            case FunctionCallItem():
                name = self._tools.name_in_chat(item.name, item.namespace)
                self._call(item.call_id, name, item.arguments)
            case CustomCallItem():
                name = self._tools.name_in_chat(item.name, item.namespace)
                self._call(item.call_id, name, dict(arguments_of(told_text(item.input))))
            case CallOutputItem():
                self._returned(item.call_id, self._result(item.output, f"{where}.output"))
            case ShellCallItem():
                self._call(item.call_id, local_shell.NAME, local_shell.arguments_of(item.action))
            case ShellOutputItem():
                self._returned(item.id, self._result(item.output, f"{where}.output"))
            case ClientCallItem() | ClientOutputItem() | HostedItem():
                self._add_tool_item(item, raw, where)
            case ConfigurationItem():
                self.reasoning = item.reasoning or self.reasoning
                self.text = item.text or self.text
            case CompactionItem():
                self.messages.append(ChatMessage(role="user", content=_summary(item, where)))
            case AdditionalToolsItem():
                # `chat_of` gets these tools with the request's others.
                pass
            case ReasoningItem():
                self._think(_thought(item))
            case _:
                raise InvalidRequest(f"{where}: {_NO_TRIGGER}", param=where)

    def _add_message(self, item: MessageItem, where: str) -> None:
        if item.role == "assistant":
            said = _content(item.content or "", where, sees=False)
            assert isinstance(said, str), "texts alone are one text"
            self._say(said)
            return
        if item.content is None:
            raise InvalidRequest(f"{where} must be a text or a list of parts.", param=where)
        content = _content(item.content, where, sees=self._sees)
        self.messages.append(ChatMessage(role=item.role, content=content))

    def _add_tool_item(
        self,
        item: ClientCallItem | ClientOutputItem | HostedItem,
        raw: Mapping[str, Any],
        where: str,
    ) -> None:
        match item:
            case ClientCallItem(call_id=str(call_id)):
                self._call(call_id, *function_of(raw))
            case ClientCallItem():
                self._say(f"[{raw['type']} {arguments_text(function_of(raw)[1])}]")
            case ClientOutputItem(call_id=str(call_id)):
                self._returned(call_id, self._client_result(raw, f"{where}.output"))
            case ClientOutputItem():
                self._say(output_text(raw))
            case _ if raw["type"] == "mcp_approval_response":
                self.messages.append(ChatMessage(role="user", content=hosted_text(raw)))
            case _:
                self._say(hosted_text(raw))

    def _think(self, thought: str) -> None:
        if thought:
            self._assistant().reasoning_content = thought

    def _say(self, text: str) -> None:
        message = self._assistant()
        message.content = f"{message.content}\n{text}" if message.content else text

    def _result(self, output: str | list[ContentPart] | None, where: str) -> Content:
        """Return a tool's result as chat content.

        A part that the model cannot read becomes a note, because tools may return any kind.
        """
        if output is None or isinstance(output, str):
            return output or ""
        parts = [
            _part(part, f"{where}[{at}]", sees=self._sees)
            if _is_readable(part, sees=self._sees)
            else text_part(note(part.type))
            for at, part in enumerate(output)
        ]
        return joined(parts)

    def _client_result(self, raw: Mapping[str, Any], where: str) -> Content:
        shown = raw.get("output")
        if self._sees and isinstance(shown, dict) and isinstance(shown.get("image_url"), str):
            return [image_part(shown["image_url"], where, sees=True)]
        return output_text(raw)

    def _returned(self, call_id: str | None, content: Content) -> None:
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
    return joined([_part(part, f"{where}[{at}]", sees=sees) for at, part in enumerate(content)])


def _is_readable(part: ContentPart, *, sees: bool) -> bool:
    if part.type == "input_image":
        return sees and bool(part.image_url)
    return part.type in _TEXTS and (part.text is not None or part.refusal is not None)


def _part(part: ContentPart, where: str, *, sees: bool) -> ChatPart:
    if part.type == "input_image":
        return image_part(part.image_url, where, sees=sees)
    text = part.refusal if part.type == "refusal" else part.text
    if text is None or part.type not in _TEXTS:
        takes = "text and images (input_image) only" if sees else "text only"
        raise InvalidRequest(f"{where}: this model takes {takes}.", param=where)
    return text_part(text)


def _thought(item: ReasoningItem) -> str:
    if isinstance(item.content, str) and item.content:
        return item.content
    if item.content:
        return "".join(part.text for part in item.content)
    kept = unwrapped("thought", item.encrypted_content or "")
    # The encrypted content may be from another server, which this one cannot read.
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
