"""The answers of the Messages routes, as the API description shows them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from runtime.service.cache_break import CacheBreak

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class ThinkingTokens(TypedDict):
    """The number of output tokens that are thoughts."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """Token counts.

    The cache counts come with `--enable-cache-report`, and are then not part of the input count.
    Cache writes are free, so their count is 0.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cache_break: NotRequired[CacheBreak]


class AnswerBlock(TypedDict):
    """A text, a thought or a call, by its `type`.

    The signature of a thought is empty, because it is never checked. If thoughts are omitted, the
    signature holds the data that the client returns in the next turn.
    """

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageAnswer(TypedDict):
    """A whole answer of `/v1/messages`; `stop_reason` is null while it is streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageStart(TypedDict):
    """The first event of a stream."""

    type: Literal["message_start"]
    message: MessageAnswer


class Ping(TypedDict):
    """An event that only keeps the connection alive."""

    type: Literal["ping"]


class BlockStart(TypedDict):
    """The event that begins a block, which is still empty."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnswerBlock


class BlockDelta(TypedDict):
    """The event that extends a block by a `text`, `thinking`, `signature` or `partial_json`."""

    type: Literal["content_block_delta"]
    index: int
    delta: dict[str, str]


class BlockStop(TypedDict):
    """The event that ends a block."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(TypedDict):
    """The reason why a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """The event that reports, after all blocks, why the message ended, and its token counts."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(TypedDict):
    """The last event of a stream."""

    type: Literal["message_stop"]


class AnthropicErrorDetail(TypedDict):
    """The type and the message of an error."""

    type: str
    message: str


class AnthropicErrorBody(TypedDict):
    """The body of an error response, and the last event of a stream that fails."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class TokenTotal(TypedDict):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


BlockEvent = BlockStart | BlockDelta | BlockStop
MessageEvent = MessageStart | Ping | BlockEvent | MessageDelta | MessageStop
