"""Types of the Responses routes' answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from runtime.service.cache_break import CacheBreak

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseFailure(TypedDict):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class EffortOfResponse(TypedDict):
    """The requested reasoning effort; `summary` is null, because reasoning is not summarised."""

    effort: str | None
    summary: None


class FormOfText(TypedDict):
    """The required form of the answer."""

    type: str
    name: NotRequired[str | None]
    schema: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class TextOfResponse(TypedDict):
    """The request's settings for the text of the answer."""

    format: FormOfText
    verbosity: str | None


class InputDetails(TypedDict):
    """Details of the input's tokens; `cached_tokens` is 0 without `--enable-cache-report`."""

    cached_tokens: int
    cache_write_tokens: int
    cache_break: NotRequired[CacheBreak]


class OutputDetails(TypedDict):
    """Details of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(TypedDict):
    """The token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseObject(TypedDict):
    """A response; `output` is a list of items: messages, reasoning and calls."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: EffortOfResponse
    safety_identifier: str | None
    service_tier: str | None
    store: bool
    temperature: float | None
    text: TextOfResponse
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(TypedDict):
    """An event of a streamed response; its `type` says which fields it has."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseObject]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[dict[str, Any]]
    part: NotRequired[dict[str, Any]]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    logprobs: NotRequired[list[Any]]


class InputTokens(TypedDict):
    """The answer of `/v1/responses/input_tokens`."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactedResponse(TypedDict):
    """A shortened conversation: its user messages, and a `compaction` item with a summary."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


class InputItems(TypedDict):
    """A page of the conversation that a response answered."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(TypedDict):
    """Says that a response was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
