"""What the OpenAI routes answer, as the description of the API shows it."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from runtime.service.cache_break import CacheBreak

FinishWord = Literal["stop", "length", "tool_calls", "function_call"]


class PromptTokens(TypedDict):
    """Of the prompt: with `--enable-cache-report`, and where it has images."""

    cached_tokens: NotRequired[int]
    image_tokens: NotRequired[int]
    cache_break: NotRequired[CacheBreak]


class ReasoningTokens(TypedDict):
    """Of the output."""

    reasoning_tokens: int


class Usage(TypedDict):
    """Token counts; those of the cache with `--enable-cache-report`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    reasoning_tokens: int
    prompt_tokens_details: PromptTokens | None
    completion_tokens_details: NotRequired[ReasoningTokens]


class Metadata(TypedDict):
    """Which weights answered."""

    weight_version: str


class TopToken(TypedDict):
    """A token and its log-probability."""

    token: str
    bytes: list[int]
    logprob: float


class ChatToken(TopToken):
    """A token of the answer, and the most probable ones at its place."""

    top_logprobs: list[TopToken]


class ChatLogprobs(TypedDict):
    """Of each token of a message."""

    content: list[ChatToken]
    refusal: None


class CalledFunction(TypedDict):
    """Whom the model calls, with what JSON text."""

    name: str
    arguments: str


class CalledCustom(TypedDict):
    """Which custom tool the model calls, with what text."""

    name: str
    input: str


class MessageToolCall(TypedDict):
    """A call in a whole message, of a function or of a custom tool."""

    index: int
    id: str
    type: Literal["function", "custom"]
    function: NotRequired[CalledFunction]
    custom: NotRequired[CalledCustom]


class AssistantMessage(TypedDict):
    """The answer; `content` is null where there are only calls.

    Where there is reasoning it has two names, for clients that know one of them.
    """

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[MessageToolCall]]
    function_call: NotRequired[CalledFunction]


class ChatChoiceBody(TypedDict):
    """One of `n` answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None
    matched_stop: int | str | None
    hidden_states: NotRequired[list[float]]


class ChatCompletion(TypedDict):
    """A whole answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoiceBody]
    usage: Usage
    metadata: Metadata
    service_tier: NotRequired[Literal["default"]]


class FunctionDelta(TypedDict):
    """The name comes first, then the arguments."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """A part of a call; the first one has its id. That of a custom tool comes whole."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CalledCustom]


class MessageDelta(TypedDict, total=False):
    """What is new in a message."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None
    reasoning: str
    tool_calls: list[ToolCallDelta]
    function_call: FunctionDelta
    hidden_states: list[float]


class ChatChunkChoice(TypedDict):
    """What is new in one of `n` answers."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None
    matched_stop: int | str | None


class ChatCompletionChunk(TypedDict):
    """An event of a streamed answer; the one with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    service_tier: NotRequired[Literal["default"]]
    obfuscation: NotRequired[str]


class CompletionLogprobsBody(TypedDict):
    """Lists with an entry for each token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(TypedDict):
    """One of the answers, all of it or what is new."""

    index: int
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: FinishWord | None
    matched_stop: int | str | None
    hidden_states: NotRequired[list[float]]


class CompletionChunk(TypedDict):
    """An event of a streamed answer; the one with the usage has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    obfuscation: NotRequired[str]


class Completion(TypedDict):
    """A whole answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metadata: Metadata


class EmbeddingData(TypedDict):
    """The vector of one input: numbers, or base64 of float32."""

    object: Literal["embedding"]
    embedding: list[float] | str
    index: int


class EmbeddingUsage(TypedDict):
    """Token counts."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage


class ModelCard(TypedDict):
    """A model that is served."""

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
    """The class of one input, and the probability of each."""

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
