"""The requests of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import msgspec

from runtime.errors import InvalidRequest
from runtime.requests.bounds import within
from runtime.requests.sampling_params import (
    INT64_MAX,
    StopStrings,
    Temperature,
    TopKOrOff,
    TopPOrZero,
)
from runtime.service.operation import described_as


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """A block of text. `cache_control` has no effect: the prefix cache works automatically."""

    text: str
    cache_control: Any = None


class ImageData(msgspec.Struct, kw_only=True):
    """The source of an image: `base64` with its data, or `url`.

    Attributes:
        media_type: the type that the client declares; ignored, because the data shows its type.
    """

    type: str | None = None
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    """An image, which a text model refuses."""

    source: ImageData | None = None
    cache_control: Any = None


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call that the assistant made earlier; `input` is not validated."""

    id: str
    name: str
    input: Any = None
    cache_control: Any = None


class ToolResultBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    """The result of a call. In the prompt, the text of an error begins with "Error: "."""

    tool_use_id: str
    content: str | list[AnyBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """The assistant's thoughts; another server's signature is not checked."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(
    msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"
):
    """Encrypted thoughts of another server, which are omitted from the prompt."""

    data: str | None = None


class ShownBlock(msgspec.Struct, kw_only=True):
    """A block of another type, shown as text: a document, a search result, a server's tool.

    A short note replaces a block whose type is unknown.
    """

    type: str


ContentBlock = (
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
)

_READ: tuple[type[msgspec.Struct], ...] = get_args(ContentBlock)
BLOCKS: tuple[type, ...] = (*_READ, ShownBlock)
_TAGS = frozenset(each.__struct_config__.tag for each in _READ)
# Blocks are decoded one by one, because newer clients send types that are unknown here.
AnyBlock = Annotated[dict[str, Any], described_as(*BLOCKS)]


def read_block(block: Mapping[str, Any], where: str) -> ContentBlock | None:
    """Decode a block by its type; `None` for one that is shown as text.

    Raises:
        InvalidRequest: the block has no type, or a field is wrong. The message names the position.
    """
    kind = block.get("type")
    if isinstance(kind, str) and kind not in _TAGS:
        return None
    try:
        return msgspec.convert(block, ContentBlock)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {error}", param=where) from None


class Message(msgspec.Struct, kw_only=True):
    """One message; coding agents also send `system` messages between the others."""

    role: Literal["user", "assistant", "system"]
    content: str | list[AnyBlock]


class ToolDefinition(msgspec.Struct, kw_only=True):
    """A tool of the client; Anthropic's own tools have another `type`, and some have no name."""

    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None


class ToolChoice(msgspec.Struct, kw_only=True):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the model thinks first, if its template has a switch for it.

    Attributes:
        budget_tokens: most tokens of thoughts; ignored if the server cannot recognize thoughts by
            their tokens.
        display: `omitted` drops the thoughts' texts from the answer; otherwise they are complete.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, within(0, INT64_MAX)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """The required form of the answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """The reasoning effort, and the required form of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class PromptFields(msgspec.Struct, kw_only=True):
    """The fields that determine the prompt."""

    model: str
    messages: list[Message]
    system: str | list[TextBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # The older name of `output_config.format`.
    output_format: OutputFormat | None = None
    # Anthropic's servers would clear parts of a conversation; here they are kept.
    context_management: Any = None
    # Features that Anthropic's servers would run or store for the client.
    mcp_servers: Any = None
    container: Any = None


class CountTokensRequest(PromptFields, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""


class MessagesRequest(PromptFields, kw_only=True):
    """The body of `/v1/messages`."""

    max_tokens: Annotated[int, within(1, INT64_MAX)]
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    temperature: Temperature | None = None
    top_p: TopPOrZero | None = None
    top_k: TopKOrOff | None = None
    # These fields label bills and have no effect here.
    metadata: Any = None
    service_tier: Any = None
    # Anthropic's API does not have this field; chat requests have it too.
    return_cache_break: bool | None = None
