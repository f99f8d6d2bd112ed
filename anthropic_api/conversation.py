"""Converts a Messages request to the chat request that the rest of the server uses."""

from __future__ import annotations

from typing import Any

from anthropic_api.message_request import (
    ImageBlock,
    ImageData,
    Message,
    MessagesRequest,
    PromptFields,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
    read_block,
)
from anthropic_api.shown_blocks import shown_text
from openai_api.billing_line import without_billing
from openai_api.content_parts import (
    Content,
    image_part,
    inline_image,
    joined,
    merged,
    note,
    text_part,
)
from openai_api.responses.opaque_text import unwrapped
from openai_api.schemas.chat import (
    MAX_PARTS,
    ChatCompletionRequest,
    ChatMessage,
    ContentPart,
    FunctionCall,
    NamedFunction,
    NamedToolChoice,
    ToolCall,
)
from runtime.errors import InvalidRequest

_IMAGE_SOURCES = ("base64", "url")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(request: MessagesRequest, *, sees: bool) -> ChatCompletionRequest:
    """Convert a request; `sees` says whether the model takes images.

    Raises:
        InvalidRequest: a chat request cannot express a part of the request. The message names the
            position of the part.
    """
    chat = prompt_request(request, sees=sees)
    chat.stream = request.stream
    chat.max_tokens = request.max_tokens
    chat.stop = request.stop_sequences
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    chat.return_cache_break = request.return_cache_break
    return chat


def prompt_request(request: PromptFields, *, sees: bool) -> ChatCompletionRequest:
    """Return a chat request made from the fields that determine the prompt.

    Raises:
        InvalidRequest: a chat request cannot express a part of the request. The message names the
            position of the part.
    """
    for name in ("mcp_servers", "container"):
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported by this server.", param=name)
    if not request.messages:
        raise InvalidRequest("messages cannot be empty.", param="messages")
    turns = _Turns(sees)
    if request.system:
        turns.say("system", text_part(_system(request.system)))
    for index, message in enumerate(request.messages):
        _add(turns, message, f"messages[{index}]")
    turns.end()
    if not turns.messages:
        raise InvalidRequest("messages have no content.", param="messages")
    chat = ChatCompletionRequest(model=request.model, messages=turns.messages)
    last = turns.messages[-1]
    chat.continue_final_message = (
        last.role == "assistant" and bool(last.content) and not last.tool_calls
    )
    chat.add_generation_prompt = not chat.continue_final_message
    _set_tools(chat, request.tools or [], request.tool_choice)
    _set_thinking(chat, request)
    form = request.output_format
    if request.output_config is not None:
        form = request.output_config.format or form
    if form is not None:
        chat.response_format = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": form.schema},
        }
    return chat


class _Turns:
    """Collects messages for the chat template; adjacent messages of one role are merged."""

    def __init__(self, sees: bool) -> None:
        self.messages: list[ChatMessage] = []
        self.sees = sees
        # The parts of the last message. They are joined once the message is complete: joining them
        # one by one would take quadratic time.
        self._said: list[ContentPart] = []
        self._thoughts: list[str] = []

    def say(self, role: str, part: ContentPart) -> None:
        self._begin(role)
        self._said.append(part)

    def think(self, text: str) -> None:
        self._begin("assistant")
        if text or self._thoughts:
            self._thoughts.append(text)

    def call(self, block: ToolUseBlock) -> None:
        function = FunctionCall(name=block.name, arguments=block.input)
        message = self._begin("assistant")
        message.tool_calls = message.tool_calls or []
        message.tool_calls.append(ToolCall(id=block.id, type="function", function=function))

    def returned(self, call_id: str, content: Content) -> None:
        self.end()
        self.messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=content))

    def end(self) -> None:
        """Complete the last message."""
        if self._said:
            self.messages[-1].content = merged(self._said)
        if self._thoughts:
            self.messages[-1].reasoning_content = "\n".join(self._thoughts)
        self._said, self._thoughts = [], []

    def _begin(self, role: str) -> ChatMessage:
        if not self.messages or self.messages[-1].role != role:
            self.end()
            self.messages.append(ChatMessage(role=role))
        return self.messages[-1]


def _system(system: str | list[TextBlock]) -> str:
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    return "\n".join(text for text in map(without_billing, texts) if text)


def _add(turns: _Turns, message: Message, where: str) -> None:
    if not message.content and message.role != "assistant":
        raise InvalidRequest(f"{where}.content must not be empty.", param=f"{where}.content")
    if isinstance(message.content, str):
        turns.say(message.role, text_part(message.content))
        return
    if len(message.content) > MAX_PARTS:
        raise InvalidRequest(
            f"{where}.content may have at most {MAX_PARTS} blocks.", param=f"{where}.content"
        )
    for index, block in enumerate(message.content):
        _add_block(turns, message.role, block, f"{where}.content[{index}]")


def _add_block(turns: _Turns, role: str, given: dict[str, Any], where: str) -> None:
    match block := read_block(given, where):
        case None:
            turns.say(role, text_part(shown_text(given)))
        case TextBlock():
            turns.say(role, text_part(block.text))
        case ToolResultBlock() if role == "user":
            turns.returned(block.tool_use_id, _result(block, where, turns.sees))
        case ToolUseBlock() if role == "assistant":
            turns.call(block)
        case ThinkingBlock() if role == "assistant":
            # If thoughts are omitted, the client keeps them in the signature.
            turns.think(block.thinking or unwrapped("thought", block.signature or "") or "")
        case RedactedThinkingBlock() if role == "assistant":
            pass
        case ImageBlock() if role == "user":
            turns.say(role, _image(block, where, turns.sees))
        case _:
            raise InvalidRequest(
                f"{where}: a block of this type cannot be in a message of the {role}.", param=where
            )


def _result(block: ToolResultBlock, where: str, sees: bool) -> Content:
    content = block.content or ""
    if isinstance(content, str):
        return f"Error: {content}" if block.is_error else content
    parts = [_result_part(part, f"{where}.content[{at}]", sees) for at, part in enumerate(content)]
    if block.is_error:
        first = parts[0].text if parts else None
        parts[:1] = [text_part(f"Error: {first or ''}"), *([] if first is not None else parts[:1])]
    return joined(parts)


def _result_part(given: dict[str, Any], where: str, sees: bool) -> ContentPart:
    match block := read_block(given, where):
        case None:
            return text_part(shown_text(given))
        case TextBlock():
            return text_part(block.text)
        case ImageBlock() if sees and block.source and block.source.type in _IMAGE_SOURCES:
            return _image(block, where, sees)
        case ImageBlock():
            # A tool may return an image to a model that takes none. The request must not fail then.
            return text_part(note("image"))
    return text_part(note(given["type"]))


def _image(block: ImageBlock, where: str, sees: bool) -> ContentPart:
    source = block.source or ImageData()
    if sees and source.type not in _IMAGE_SOURCES:
        raise InvalidRequest(
            f"{where}.source.type must be base64 or url, got {str(source.type)[:64]!r}.",
            param=f"{where}.source.type",
        )
    url = source.url if source.type == "url" else inline_image(source.data or "")
    return image_part(url, where, sees=sees)


def _set_tools(
    chat: ChatCompletionRequest, tools: list[ToolDefinition], choice: ToolChoice | None
) -> None:
    if tools:
        chat.tools = [_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if choice is None:
        return
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest("tool_choice needs a name.", param="tool_choice")
        chat.tool_choice = NamedToolChoice(
            type="function", function=NamedFunction(name=choice.name)
        )
    else:
        chat.tool_choice = _CHOICES[choice.type]
    if choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False


def _function(tool: ToolDefinition, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"{where}: {tool.type[:64]!r} is one of Anthropic's own tools; this server takes tools "
            "of the client, with a name and an input_schema.",
            param=f"{where}.type",
        )
    if not tool.name:
        raise InvalidRequest(f"{where}.name must be given.", param=f"{where}.name")
    if tool.input_schema is None:
        raise InvalidRequest(
            f"{where}.input_schema must be given: a JSON schema of the tool's input.",
            param=f"{where}.input_schema",
        )
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    # Anthropic's types allow null for these keys.
    schema = {
        key: value
        for key, value in tool.input_schema.items()
        if value is not None or key not in ("properties", "required")
    }
    function["parameters"] = schema or {"type": "object", "properties": {}}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _set_thinking(chat: ChatCompletionRequest, request: PromptFields) -> None:
    if request.output_config is not None:
        chat.reasoning_effort = request.output_config.effort
    if request.thinking is not None and request.thinking.type in ("enabled", "disabled"):
        thinks = request.thinking.type == "enabled"
        # Families of chat templates use two names for this switch.
        chat.chat_template_kwargs = {"enable_thinking": thinks, "thinking": thinks}
