"""A Messages request becomes the chat request that the rest of the server knows."""

from __future__ import annotations

from typing import Any

from anthropic_api.message_request import (
    ContentBlock,
    DocumentBlock,
    ImageBlock,
    Message,
    MessagesRequest,
    PromptFields,
    RedactedThinkingBlock,
    ResultPart,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolDefinition,
    ToolResultBlock,
    ToolUseBlock,
)
from openai_api.billing_line import without_billing
from openai_api.responses.opaque_text import unwrapped
from openai_api.schemas.chat import (
    MAX_PARTS,
    ChatCompletionRequest,
    ChatMessage,
    FunctionCall,
    NamedFunction,
    NamedToolChoice,
    ToolCall,
)
from runtime.errors import InvalidRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(request: MessagesRequest) -> ChatCompletionRequest:
    """Convert.

    Raises:
        InvalidRequest: something that no chat can carry, named by its place in the request.
    """
    chat = prompt_request(request)
    chat.stream = request.stream
    chat.max_tokens = request.max_tokens
    chat.stop = request.stop_sequences
    chat.temperature = request.temperature
    chat.top_p = request.top_p
    chat.top_k = request.top_k
    chat.return_cache_break = request.return_cache_break
    return chat


def prompt_request(request: PromptFields) -> ChatCompletionRequest:
    """Convert what makes the prompt.

    Raises:
        InvalidRequest: see `chat_request`.
    """
    for name in ("mcp_servers", "container"):
        if getattr(request, name):
            raise InvalidRequest(f"{name} is not supported by this server.", param=name)
    if not request.messages:
        raise InvalidRequest("messages cannot be empty.", param="messages")
    turns = _Turns()
    if request.system:
        turns.say("system", _system(request.system))
    for index, message in enumerate(request.messages):
        _add(turns, message, f"messages[{index}]")
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
    """Messages as chat templates want them: neighbours of one role are one message."""

    def __init__(self) -> None:
        self.messages: list[ChatMessage] = []

    def say(self, role: str, text: str) -> None:
        message = self._of(role)
        said = message.content
        message.content = f"{said}\n{text}" if said else text

    def think(self, text: str) -> None:
        message = self._of("assistant")
        before = message.reasoning_content
        message.reasoning_content = f"{before}\n{text}" if before else text

    def call(self, block: ToolUseBlock) -> None:
        function = FunctionCall(name=block.name, arguments=block.input)
        message = self._of("assistant")
        calls = message.tool_calls or []
        message.tool_calls = [*calls, ToolCall(id=block.id, type="function", function=function)]

    def returned(self, call_id: str, text: str) -> None:
        self.messages.append(ChatMessage(role="tool", tool_call_id=call_id, content=text))

    def _of(self, role: str) -> ChatMessage:
        if not self.messages or self.messages[-1].role != role:
            self.messages.append(ChatMessage(role=role))
        return self.messages[-1]


def _system(system: str | list[TextBlock]) -> str:
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    return "\n".join(text for text in map(without_billing, texts) if text)


def _add(turns: _Turns, message: Message, where: str) -> None:
    if not message.content and message.role != "assistant":
        raise InvalidRequest(f"{where}.content must not be empty.", param=f"{where}.content")
    if isinstance(message.content, str):
        turns.say(message.role, message.content)
        return
    if len(message.content) > MAX_PARTS:
        raise InvalidRequest(
            f"{where}.content may have at most {MAX_PARTS} blocks.", param=f"{where}.content"
        )
    for index, block in enumerate(message.content):
        _add_block(turns, message.role, block, f"{where}.content[{index}]")


def _add_block(turns: _Turns, role: str, block: ContentBlock, where: str) -> None:
    match block:
        case TextBlock():
            turns.say(role, block.text)
        case ToolResultBlock() if role == "user":
            text = _result(block.content, where)
            turns.returned(block.tool_use_id, f"Error: {text}" if block.is_error else text)
        case ToolUseBlock() if role == "assistant":
            turns.call(block)
        case ThinkingBlock() if role == "assistant":
            # Where thoughts are omitted the client keeps them in the signature.
            turns.think(block.thinking or unwrapped("thought", block.signature or "") or "")
        case RedactedThinkingBlock() if role == "assistant":
            pass
        case ImageBlock() | DocumentBlock():
            raise _not_text(where)
        case _:
            raise InvalidRequest(
                f"{where}: a block of this type cannot be in a message of the {role}.", param=where
            )


def _result(content: str | list[ResultPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, TextBlock):
            raise _not_text(f"{where}.content[{index}]")
        texts.append(part.text)
    return "\n".join(texts)


def _not_text(where: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: this model takes text only.", param=where)


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
            f"{where}: {tool.type[:64]!r} is a tool that Anthropic's servers run; this server "
            "takes tools of the client, with an input_schema.",
            param=f"{where}.type",
        )
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _set_thinking(chat: ChatCompletionRequest, request: PromptFields) -> None:
    if request.output_config is not None:
        chat.reasoning_effort = request.output_config.effort
    if request.thinking is not None and request.thinking.type in ("enabled", "disabled"):
        thinks = request.thinking.type == "enabled"
        # Two families of templates, two names for one switch.
        chat.chat_template_kwargs = {"enable_thinking": thinks, "thinking": thinks}
