"""The request of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from openai_api.logprobs import MAX_CHAT_TOP
from openai_api.schemas.common import (
    GenerationFields,
    Rid,
    check_stream_options,
    refuse_unsupported,
)
from openai_api.schemas.neutral import neutral
from runtime.errors import InvalidRequest
from runtime.eventloop.absent_nulls import convert
from runtime.eventloop.body_errors import fields_of_type
from runtime.grammar.schema_check import check_well_formed
from runtime.media.image_source import ImageUrl
from runtime.requests.bounds import within
from runtime.requests.sampling_params import INT64_MAX
from runtime.service.operation import described_as

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
# The roles whose messages must have content. An assistant may write only calls, and a tool may
# return an empty result.
_SPEAKERS = frozenset({"system", "developer", "user"})
MAX_TOOLS = 1024
MAX_PARTS = 4096


class ContentPart(msgspec.Struct, kw_only=True):
    """One part of a message's content.

    Attributes:
        image_url: set for a part of type `image_url`: an address, a data URL or base64, or an
            object with one of them.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function call that the assistant made in an earlier turn.

    Attributes:
        arguments: the arguments as JSON text or as an object. Any other value is accepted too.
    """

    name: str
    arguments: Any = None


class CustomCall(msgspec.Struct, kw_only=True):
    """An earlier call of a custom tool; an `input` that is not a text is shown as JSON."""

    name: str
    input: Any = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call in an assistant's message, of a function or of a custom tool."""

    function: FunctionCall | None = None
    custom: CustomCall | None = None
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    """One message of the conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class FunctionSpec(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A tool that is a function."""

    type: str
    function: FunctionSpec


class CustomGrammar(msgspec.Struct, kw_only=True):
    """A grammar for the text of a custom tool, which is shown to the model.

    A regular expression is also enforced, like the schema of a strict function. A Lark grammar is
    not enforced.
    """

    definition: str
    syntax: Literal["lark", "regex"]


class CustomFormat(msgspec.Struct, kw_only=True):
    """The required form of the text for a custom tool."""

    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomSpec(msgspec.Struct, kw_only=True):
    """A custom tool, whose input is plain text."""

    name: str
    description: str | None = None
    format: CustomFormat | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A tool: a function, or (with the type `custom`) a tool whose input is plain text."""

    type: str
    function: FunctionSpec | None = None
    custom: CustomSpec | None = None


class NamedFunction(msgspec.Struct, kw_only=True):
    """The function that `tool_choice` names."""

    name: str


class AllowedTools(msgspec.Struct, kw_only=True):
    """The tools that may be called, of those in `tools`."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """`tool_choice` as an object, which names one tool or the allowed tools."""

    type: str
    function: NamedFunction | None = None
    custom: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class PredictedOutput(msgspec.Struct, kw_only=True):
    """Text that the answer is expected to repeat."""

    type: Literal["content"]
    content: str | list[ContentPart]


class Reasoning(msgspec.Struct, kw_only=True):
    """OpenRouter's object that sets the reasoning effort, or turns reasoning on or off."""

    effort: str | None = None
    enabled: bool | None = None


class ThinkingSwitch(msgspec.Struct, kw_only=True):
    """Whether the model reasons, in the format of the APIs of GLM, DeepSeek and Kimi.

    Attributes:
        type: `enabled` and `disabled` set the switch of chat templates that have one. The other
            values leave the decision to the template.
        clear_thinking: whether reasoning of earlier turns is left out; a variable of GLM's
            templates.
    """

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    clear_thinking: bool | None = None


class ChatCompletionRequest(GenerationFields, kw_only=True):
    """The body of `/v1/chat/completions`; `tools` stays as sent, because templates print it."""

    messages: list[ChatMessage]
    max_tokens: Annotated[int, within(1, INT64_MAX)] | None = None
    max_completion_tokens: Annotated[int, within(1, INT64_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, within(0, MAX_CHAT_TOP)] | None = None
    tools: list[Annotated[dict[str, Any], described_as(Tool)]] | None = None
    tool_choice: str | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # OpenAI's older names for `tools` and `tool_choice`.
    functions: list[Annotated[dict[str, Any], described_as(FunctionSpec)]] | None = None
    function_call: str | NamedFunction | None = None
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    reasoning: Reasoning | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    max_thinking_tokens: Annotated[int, within(0, INT64_MAX)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    # Objects that are passed to the chat template unchanged, usually with `title` and `text`.
    documents: list[dict[str, Any]] | None = None
    split_special_tokens: bool | None = None
    rid: Rid | None = None
    return_cache_break: bool | None = None

    modalities: Annotated[
        list[str] | None, neutral("answers are text; another modality is refused")
    ] = None
    service_tier: str | None = None
    store: Annotated[bool | None, neutral("answers of chat are not kept")] = None
    metadata: Annotated[dict[str, str] | None, neutral("it labels answers that are kept")] = None
    prediction: Annotated[
        PredictedOutput | None, neutral("it could only speed up an answer, not change it")
    ] = None
    safety_identifier: Annotated[str | None, neutral("nothing is moderated")] = None
    prompt_cache_key: Annotated[str | None, neutral("prefixes are found by their tokens")] = None
    prompt_cache_retention: Annotated[
        str | None, neutral("prefixes are kept as long as there is room")
    ] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, neutral("prefixes are kept as long as there is room")
    ] = None

    input_ids: Any = None
    audio: Any = None
    moderation: Any = None
    web_search_options: Any = None


DECODER = msgspec.json.Decoder(ChatCompletionRequest)

# Fields of features that this server does not have.
_UNSUPPORTED = fields_of_type(ChatCompletionRequest, Any)


def check_chat_request(request: ChatCompletionRequest) -> None:
    """Check roles, tools and unsupported features, as far as that needs no model.

    Raises:
        InvalidRequest: the first error found.
    """
    if not request.messages:
        raise InvalidRequest("messages cannot be empty.", param="messages")
    for index, message in enumerate(request.messages):
        if message.role.lower() not in ROLES:
            raise InvalidRequest(
                f"messages[{index}].role must be one of {', '.join(sorted(ROLES))}.",
                param=f"messages[{index}].role",
            )
        if not message.content and message.content != "" and message.role.lower() in _SPEAKERS:
            raise InvalidRequest(
                f"messages[{index}].content must be given: a text or a list of parts.",
                param=f"messages[{index}].content",
            )
        if isinstance(message.content, list) and len(message.content) > MAX_PARTS:
            raise InvalidRequest(
                f"messages[{index}].content may have at most {MAX_PARTS} parts.",
                param=f"messages[{index}].content",
            )
    refuse_unsupported(request, _UNSUPPORTED)
    check_stream_options(request)
    if request.modalities and request.modalities != ["text"]:
        raise InvalidRequest("modalities: this server answers in text only.", param="modalities")
    if request.chat_template:
        raise InvalidRequest(
            "A chat template cannot come with a request; the server's operator sets it with "
            "--chat-template.",
            param="chat_template",
        )
    _check_tools(request)


def callable_tools(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """Return the tools that `tool_choice` allows the model to call.

    If the result is empty, the prompt shows no tools. Otherwise the prompt shows all tools of the
    request, also those that may not be called.
    """
    choice, tools = request.tool_choice, request.tools or []
    if choice == "none":
        return []
    allowed = choice.allowed_tools if isinstance(choice, NamedToolChoice) else None
    if allowed is None:
        return tools
    names = {tool["function"]["name"] for tool in allowed.tools}
    return [tool for tool in tools if tool["function"]["name"] in names]


def tool_names(request: ChatCompletionRequest) -> list[str]:
    """Return the names of the functions that the model may call."""
    if not request.tools:
        return []
    return [tool["function"]["name"] for tool in callable_tools(request)]


def offered_functions(request: ChatCompletionRequest) -> dict[str, dict[str, Any]]:
    """Return the functions that the model may call, with the schemas of their parameters."""
    if not request.tools:
        return {}
    functions = [tool["function"] for tool in callable_tools(request)]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def _check_tools(request: ChatCompletionRequest) -> None:
    if not request.tools:
        _check_tool_choice(request.tool_choice, set())
        return
    tools = _typed_tools(request.tools)
    for index, tool in enumerate(tools):
        if tool.type != "function" or not tool.function.name:
            raise InvalidRequest(
                f"tools[{index}] must be a function with a name.", param=f"tools[{index}]"
            )
    check_well_formed(
        (tool.function.parameters, f"tools[{index}].function.parameters")
        for index, tool in enumerate(tools)
        if tool.function.parameters is not None
    )
    _check_tool_choice(request.tool_choice, {tool.function.name for tool in tools})


def _typed_tools(tools: list[dict[str, Any]]) -> list[FunctionTool]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"At most {MAX_TOOLS} tools are allowed.", param="tools")
    try:
        return convert(tools, list[FunctionTool])
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"tools: {error}", param="tools") from None


def _check_tool_choice(choice: str | NamedToolChoice | None, names: set[str]) -> None:
    if choice is None or choice in ("none", "auto"):
        return
    if isinstance(choice, str) and choice != "required":
        raise InvalidRequest(
            "tool_choice must be none, auto, required or a function's name in an object.",
            param="tool_choice",
        )
    if not names:
        raise InvalidRequest("tool_choice needs tools to choose from.", param="tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.allowed_tools is None:
        name = choice.function.name if choice.function else ""
        if name not in names:
            raise InvalidRequest(
                f"tool_choice names {name[:64]!r}, which is not among the tools.",
                param="tool_choice",
            )
