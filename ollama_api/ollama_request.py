"""The requests of Ollama's routes."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.requests.sampling_params import (
    FrequencyPenalty,
    Int64,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    StopString,
    StopStrings,
    Temperature,
    TopKOrOff,
    TopPOrZero,
)


class Options(msgspec.Struct, kw_only=True):
    """Sampling parameters; those that only tune Ollama's engine (`num_ctx`, ...) are ignored.

    Attributes:
        num_predict: most tokens of the answer; 0 or less for as many as fit.
    """

    num_predict: int | None = None
    temperature: Temperature | None = None
    top_p: TopPOrZero | None = None
    top_k: TopKOrOff | None = None
    min_p: MinP | None = None
    stop: StopString | StopStrings | None = None
    seed: Int64 | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """A call that the assistant made earlier; `arguments` are not validated."""

    name: str
    arguments: Any = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call in an assistant's message."""

    function: CalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One message of the conversation."""

    role: str
    content: str = ""
    thinking: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[str] | None = None


class AnswerFields(msgspec.Struct, kw_only=True):
    """The fields of both routes; `keep_alive` is ignored, because one model is always loaded."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: Any = None


class OllamaChatRequest(AnswerFields, kw_only=True):
    """The body of `/api/chat`."""

    messages: list[OllamaMessage] = []
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(AnswerFields, kw_only=True):
    """The body of `/api/generate`; with `raw` the prompt is sent to the model unchanged."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None
    context: Any = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """The body of `/api/embed`; `options` and `keep_alive` are ignored.

    Attributes:
        truncate: whether a text that is too long is cut; true by default.
    """

    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: Any = None
    keep_alive: Any = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The body of `/api/embeddings`; like `/api/embed` for one text."""

    model: str
    prompt: str | None = None
    options: Any = None
    keep_alive: Any = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """The body of `/api/show`."""

    model: str = ""
    name: str = ""
    verbose: bool | None = None
