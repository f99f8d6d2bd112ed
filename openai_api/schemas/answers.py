"""Types of the OpenAI routes' answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from runtime.service.cache_break import CacheBreak

FinishWord = Literal["stop", "length", "tool_calls", "function_call"]


class PromptTokens(TypedDict):
    """Details of the prompt's tokens; sent with `--enable-cache-report`, or if it has images."""

    cached_tokens: NotRequired[int]
    image_tokens: NotRequired[int]
    cache_break: NotRequired[CacheBreak]


class ReasoningTokens(TypedDict):
    """The number of the output's tokens that are reasoning."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts. `prompt_tokens_details` is null unless there are details to report."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int
    prompt_tokens_details: PromptTokens | None
    completion_tokens_details: NotRequired[ReasoningTokens]


class Metadata(TypedDict):
    """The label of the weights that computed the answer."""

    weight_version: str


class TopToken(TypedDict):
    """A token and its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class ChatToken(TopToken):
    """A token of the answer, and the most probable tokens at its position."""

    top_logprobs: list[TopToken]


class ChatLogprobs(TypedDict):
    """Log-probabilities of each token of a message."""

    content: list[ChatToken]
    refusal: None


class CalledFunction(TypedDict):
    """The function that the model calls, and its arguments as JSON text."""

    name: str
    arguments: str


class CalledCustom(TypedDict):
    """The custom tool that the model calls, and its input text."""

    name: str
    input: str


class MessageToolCall(TypedDict):
    """A call of a function or of a custom tool, in a complete message."""

    index: int
    id: str
    type: Literal["function", "custom"]
    function: NotRequired[CalledFunction]
    custom: NotRequired[CalledCustom]


class AssistantMessage(TypedDict):
    """The assistant's answer; `content` is null if there are only calls.

    Reasoning is sent under two names: some clients read `reasoning_content`, some `reasoning`.
    """

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[MessageToolCall]]
    function_call: NotRequired[CalledFunction]


class ChatChoiceBody(TypedDict):
    """One of the `n` answers to a request."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None
    matched_stop: int | str | None
    hidden_states: NotRequired[list[float]]


class ChatCompletion(TypedDict):
    """The complete answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoiceBody]
    usage: Usage
    metadata: Metadata
    service_tier: NotRequired[Literal["default"]]


class FunctionDelta(TypedDict):
    """A part of a function call: the first part has the name, later parts have arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A part of a call; only the first part has the id. A custom tool's call comes in one part."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CalledCustom]


class MessageDelta(TypedDict, total=False):
    """The part of a message that is new since the last event."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    reasoning: str
    tool_calls: list[ToolCallDelta]
    function_call: FunctionDelta
    hidden_states: list[float]


class ChatChunkChoice(TypedDict):
    """The part of one of the `n` answers that is new since the last event."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None
    matched_stop: int | str | None


class ChatCompletionChunk(TypedDict):
    """An event of a streamed answer. The event with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    service_tier: NotRequired[Literal["default"]]
    obfuscation: NotRequired[str]


class CompletionLogprobsBody(TypedDict):
    """Lists of log-probabilities with one entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(TypedDict):
    """One of the answers: complete, or in a stream only its new part."""

    index: int
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: FinishWord | None
    matched_stop: int | str | None
    hidden_states: NotRequired[list[float]]


class CompletionChunk(TypedDict):
    """An event of a streamed answer. The event with the usage has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    obfuscation: NotRequired[str]


class Completion(TypedDict):
    """The complete answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metadata: Metadata


class EmbeddingData(TypedDict):
    """The vector of one input: a list of numbers, or base64 of its float32 bytes."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int


class EmbeddingUsage(TypedDict):
    """Token counts of all inputs together."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage


class ModelCard(TypedDict):
    """The description of the served model, or of an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(TypedDict):
    """The answer of `/v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class ClassifiedText(TypedDict):
    """The class of one input, and the probability of each class."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classification(TypedDict):
    """The answer of `/v1/classify`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifiedText]
    usage: EmbeddingUsage
