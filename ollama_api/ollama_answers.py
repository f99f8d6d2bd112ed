"""The answers of Ollama's routes, as the API description shows them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

DoneReason = Literal["stop", "length", "load"]


class OllamaFunction(TypedDict):
    """The called function, and its arguments."""

    name: str
    arguments: dict[str, Any]


class OllamaCall(TypedDict):
    """A tool call."""

    function: OllamaFunction


class OllamaAnswerMessage(TypedDict):
    """The assistant's message; in a stream, only its new part."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class Counts(TypedDict, total=False):
    """The token counts and durations (nanoseconds) of a complete answer."""

    done_reason: DoneReason
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int


class ChatLine(Counts):
    """A whole answer of `/api/chat`, or one line of a streamed answer."""

    model: str
    created_at: str
    message: OllamaAnswerMessage
    done: bool


class GenerateLine(Counts):
    """A whole answer of `/api/generate`, or one line of a streamed answer."""

    model: str
    created_at: str
    response: str
    thinking: NotRequired[str]
    done: bool


class ModelDetails(TypedDict):
    """A description of a model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelTag(TypedDict):
    """A model that is served."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelTags(TypedDict):
    """The answer of `/api/tags` and `/api/ps`."""

    models: list[ModelTag]


class ShownModel(TypedDict):
    """The answer of `/api/show`."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class Embeddings(TypedDict):
    """The answer of `/api/embed`; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OldEmbedding(TypedDict):
    """The answer of `/api/embeddings`."""

    embedding: list[float]


class OllamaVersion(TypedDict):
    """The answer of `/api/version`."""

    version: str


class OllamaErrorBody(TypedDict):
    """The body of an error response, and the last line of a stream that fails."""

    error: str
