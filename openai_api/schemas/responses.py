"""The requests of the `/v1/responses` routes, and the items that make up a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from openai_api.logprobs import MAX_CHAT_TOP
from openai_api.responses.local_shell import ShellAction
from openai_api.responses.shown_items import CLIENT_CALLS, CLIENT_OUTPUTS, HOSTED_ITEMS
from openai_api.schemas.chat import ThinkingSwitch
from openai_api.schemas.common import Salt
from openai_api.schemas.neutral import neutral
from runtime.errors import InvalidRequest
from runtime.eventloop.absent_nulls import convert
from runtime.eventloop.body_errors import fields_of_type
from runtime.requests.bounds import within
from runtime.requests.sampling_params import (
    INT64_MAX,
    FrequencyPenalty,
    Int64,
    MinP,
    PresencePenalty,
    StopString,
    StopStrings,
    Temperature,
    TopKOrOff,
    TopPOrZero,
)

MAX_ITEMS = 16_384
Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]


class ContentPart(msgspec.Struct, kw_only=True):
    """A part of a message or of a tool's result.

    Attributes:
        image_url: set for a part of type `input_image`: an address, a data URL or base64.
        detail: accepted without effect; the model determines an image's size.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class MessageItem(msgspec.Struct, kw_only=True):
    """A message of any role; an item without a `type` is a message."""

    role: str
    content: str | list[ContentPart] | None


class FunctionCallItem(msgspec.Struct, kw_only=True):
    """A function call that the model made in an earlier turn; `arguments` may be any value."""

    call_id: str
    name: str
    arguments: Any = None
    namespace: str | None = None


class CustomCallItem(msgspec.Struct, kw_only=True):
    """An earlier call of a custom tool, whose input is plain text."""

    call_id: str
    name: str
    input: Any = None
    namespace: str | None = None


class CallOutputItem(msgspec.Struct, kw_only=True):
    """The result of a call. Without a `call_id`, it belongs to the call before it."""

    call_id: str | None = None
    output: str | list[ContentPart] | None = None


class ShellCallItem(msgspec.Struct, kw_only=True):
    """A shell command that the model ran on the client's machine in an earlier turn."""

    call_id: str
    action: ShellAction


class ShellOutputItem(msgspec.Struct, kw_only=True):
    """The output of a shell command; `id` is the id of the call."""

    id: str
    output: str | list[ContentPart] | None = None


class ClientCallItem(msgspec.Struct, kw_only=True):
    """A call of one of OpenAI's tools that run on the client's machine: shell, patch or computer.

    Attributes:
        call_id: `None` for a tool search that OpenAI's servers made.
    """

    call_id: str | None = None


class ClientOutputItem(msgspec.Struct, kw_only=True):
    """The result of a `ClientCallItem`, with the same `call_id`."""

    call_id: str | None = None


class CompactionItem(msgspec.Struct, kw_only=True):
    """A summary in place of the earlier conversation, made by `/v1/responses/compact`."""

    encrypted_content: str


class AdditionalToolsItem(msgspec.Struct, kw_only=True):
    """Further tools that the model may call."""

    tools: list[dict[str, Any]]


class HostedItem(msgspec.Struct, kw_only=True):
    """The record of a tool call that OpenAI's servers executed; shown to the model as a text."""


class ConfigurationItem(msgspec.Struct, kw_only=True):
    """Settings that replace those of the request. Of several such items, the last one counts."""

    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None


class CompactionTriggerItem(msgspec.Struct, kw_only=True):
    """Requests a summary of the conversation before it, which this server refuses."""


class ReasoningPart(msgspec.Struct, kw_only=True):
    """A piece of reasoning, or of the summary of reasoning."""

    text: str


class ReasoningItem(msgspec.Struct, kw_only=True):
    """The model's reasoning. A client whose responses are not stored sends `encrypted_content`."""

    summary: list[ReasoningPart] = []
    content: str | list[ReasoningPart] | None = None
    encrypted_content: str | None = None


class ItemReference(msgspec.Struct, kw_only=True):
    """Stands for an item of a stored response, named by its id."""

    id: str


Item = (
    MessageItem
    | FunctionCallItem
    | CustomCallItem
    | CallOutputItem
    | ShellCallItem
    | ShellOutputItem
    | ReasoningItem
    | CompactionItem
    | AdditionalToolsItem
    | ClientCallItem
    | ClientOutputItem
    | HostedItem
    | ConfigurationItem
    | CompactionTriggerItem
    | ItemReference
)

_KINDS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "local_shell_call": ShellCallItem,
    "local_shell_call_output": ShellOutputItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
    "additional_tools": AdditionalToolsItem,
    "item_reference": ItemReference,
    "configuration_update": ConfigurationItem,
    "compaction_trigger": CompactionTriggerItem,
    **dict.fromkeys(CLIENT_CALLS, ClientCallItem),
    **dict.fromkeys(CLIENT_OUTPUTS, ClientOutputItem),
    **dict.fromkeys(HOSTED_ITEMS, HostedItem),
}


def check_num_items(count: int) -> None:
    """Check the number of items of a conversation.

    Raises:
        InvalidRequest: there are more than `MAX_ITEMS`.
    """
    if count > MAX_ITEMS:
        raise InvalidRequest(f"input may have at most {MAX_ITEMS} items.", param="input")


def kind_of(item: Mapping[str, Any]) -> Any:
    """Return the type of an item; without a `type` it is a reference if it has only an id."""
    kind = item.get("type")
    if kind is not None:
        return kind
    is_reference = "id" in item and not item.keys() - {"id", "type"}
    return "item_reference" if is_reference else "message"


def read_item(item: Mapping[str, Any], where: str) -> Item:
    """Decode a JSON object to the struct of its item type.

    Raises:
        InvalidRequest: the type is unknown, or a field is wrong; the message has its path.
    """
    kind = kind_of(item)
    known = _KINDS.get(kind) if isinstance(kind, str) else None
    if known is None:
        raise InvalidRequest(
            f"{where}.type must be one of {', '.join(_KINDS)}, got {str(kind)[:64]!r}.",
            param=f"{where}.type",
        )
    try:
        return convert(item, known)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}", param=where) from None


def tools_added_by(item: Mapping[str, Any]) -> list[Any]:
    """Return the tools of an unchecked item of type `additional_tools`; else an empty list."""
    tools = item.get("tools") if item.get("type") == "additional_tools" else None
    return tools if isinstance(tools, list) else []


class TextFormat(msgspec.Struct, kw_only=True):
    """The required form of the answer."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True):
    """Settings of the answer's text; `verbosity` is passed to the chat template."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """Settings of the reasoning.

    `effort` is passed to the chat template. Reasoning is sent complete, so the settings for
    summaries have no effect.
    """

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ContextManagement(msgspec.Struct, kw_only=True):
    """When the server replaces a conversation by a summary.

    Attributes:
        compact_threshold: number of the prompt's tokens above which the server does so; `None`
            means two thirds of the tokens that fit.
    """

    type: Literal["compaction"]
    compact_threshold: Annotated[int, within(1, INT64_MAX)] | None = None


class ItemsRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/responses/input_tokens`: the fields that determine the prompt."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        neutral("auto drops the oldest turns of an input that is too long"),
    ] = None
    # Fields that OpenAI's API does not have, as in chat.
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    documents: list[dict[str, Any]] | None = None

    conversation: Any = None
    prompt: Any = None


class ResponseRequest(ItemsRequest, kw_only=True):
    """The body of `/v1/responses`."""

    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Annotated[int, within(1, INT64_MAX)] | None = None
    temperature: Temperature | None = None
    top_p: TopPOrZero | None = None
    top_logprobs: Annotated[int, within(0, MAX_CHAT_TOP)] | None = None
    include: list[Includable] | None = None
    metadata: Annotated[dict[str, str] | None, neutral("a label of the response")] = None

    # Fields that have no effect here; the response repeats some of them.
    user: Annotated[str | None, neutral("a label of the response")] = None
    safety_identifier: Annotated[str | None, neutral("a label of the response")] = None
    prompt_cache_key: Annotated[str | None, neutral("prefixes are found by their tokens")] = None
    prompt_cache_retention: Annotated[
        str | None, neutral("prefixes are kept as long as there is room")
    ] = None
    prompt_cache_options: Annotated[
        dict[str, Any] | None, neutral("prefixes are kept as long as there is room")
    ] = None
    service_tier: Annotated[str | None, neutral("there is one tier")] = None
    max_tool_calls: Annotated[int | None, neutral("no tools run on the server")] = None
    stream_options: Annotated[
        dict[str, Any] | None, neutral("the usage always comes, obfuscation never")
    ] = None
    context_management: list[ContextManagement] | None = None

    # Fields that OpenAI's API does not have, as in chat.
    top_k: TopKOrOff | None = None
    min_p: MinP | None = None
    stop: StopString | StopStrings | None = None
    frequency_penalty: FrequencyPenalty | None = None
    presence_penalty: PresencePenalty | None = None
    seed: Int64 | None = None
    priority: Int64 | None = None
    cache_salt: Salt | None = None
    extra_key: Salt | None = None
    return_cache_break: bool | None = None

    moderation: Any = None
    image: Any = None
    background_options: Any = None
    access_programs: Any = None


class CompactRequest(msgspec.Struct, kw_only=True):
    """The body of `/v1/responses/compact`: the conversation to shorten."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None


DECODER = msgspec.json.Decoder(ResponseRequest)
ITEMS_DECODER = msgspec.json.Decoder(ItemsRequest)
COMPACT_DECODER = msgspec.json.Decoder(CompactRequest)
_UNSUPPORTED = fields_of_type(ResponseRequest, Any)


def refuse_unsupported_items(request: ItemsRequest) -> None:
    """Refuse unsupported fields.

    Raises:
        InvalidRequest: the first unsupported field.
    """
    for name in _UNSUPPORTED:
        if getattr(request, name, None):
            raise InvalidRequest(f"{name} is not supported by this server yet.", param=name)
