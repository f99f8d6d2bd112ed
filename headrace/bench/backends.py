"""The HTTP APIs of measured servers: each writes request bodies and reads events of answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from headrace.bench.record import BenchRequest, RequestRecord
from headrace.http_stream import HttpClient, OnEvent
from runtime.errors import HeadraceError, StartupError

_DONE = b"[DONE]"


class Wire(msgspec.Struct, frozen=True):
    """Settings for the body of every request.

    Attributes:
        model: the model name, which OpenAI's routes require.
        extra: keys added to every body; they replace equal keys of the benchmark.
    """

    model: str = ""
    ignore_eos: bool = True
    temperature: float = 0.0
    extra: dict[str, Any] = {}


class Backend(Protocol):
    """An HTTP API of the measured server."""

    path: str
    flush_path: str | None

    def body(self, request: BenchRequest, wire: Wire) -> dict[str, Any]:
        """Return the body of a request as a JSON object."""
        ...

    def reader(self, record: RequestRecord) -> OnEvent:
        """Return a callback that reads each event of the answer into `record`."""
        ...


class _NativeMeta(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: dict[str, Any] | None = None


class _NativeEvent(msgspec.Struct):
    meta_info: _NativeMeta | None = None
    error: Any = None


class Native:
    """The route `/generate` of Headrace and SGLang, which reports token counts in `meta_info`."""

    path = "/generate"
    flush_path: str | None = "/flush_cache"

    def body(self, request: BenchRequest, wire: Wire) -> dict[str, Any]:
        """Return the JSON body of a request to `/generate`."""
        if request.messages is not None:
            raise HeadraceError("/generate takes no messages; use --backend openai-chat.")
        ids = request.input_ids
        prompt = {"text": request.text} if ids is None else {"input_ids": ids}
        sampling = {
            "max_new_tokens": request.output_len,
            "temperature": wire.temperature,
            "ignore_eos": wire.ignore_eos,
        }
        return {**prompt, "sampling_params": sampling, "stream": True}

    def reader(self, record: RequestRecord) -> OnEvent:
        """Return a callback that reads each event of the answer into `record`."""
        decode = msgspec.json.Decoder(_NativeEvent).decode

        def read(when: float, data: bytes) -> None:
            event = decode(data)
            meta = event.meta_info
            if meta is None:
                record.error = describe_error(event.error)
                return
            new = meta.completion_tokens - record.output_tokens
            if new > 0:
                record.add(when, new)
                record.output_tokens = meta.completion_tokens
            reason = meta.finish_reason
            if reason is not None:
                record.prompt_tokens, record.cached_tokens = meta.prompt_tokens, meta.cached_tokens
                if reason.get("type") == "abort":
                    record.error = str(reason.get("message") or "aborted")

        return read


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _OpenAIEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


def _completion_has_token(choice: _Choice) -> bool:
    # A piece without text may still hold a token, if the token does not complete a character. Only
    # the last piece, which has a finish reason, may hold no token.
    return bool(choice.text) or choice.finish_reason is None


def _chat_has_token(choice: _Choice) -> bool:
    delta = choice.delta
    return delta is not None and bool(
        delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls
    )


class OpenAI:
    """OpenAI's routes for completions and chat.

    If the events of an answer report no usage, each event counts as one token.
    """

    flush_path: str | None = None

    def __init__(
        self,
        path: str,
        prompt: Callable[[BenchRequest], dict[str, Any]],
        has_token: Callable[[_Choice], bool],
    ) -> None:
        """Store the route and the functions that differ between the routes.

        Args:
            path: the path of the route.
            prompt: function that returns the keys of the body that hold a request's prompt.
            has_token: function that says whether a choice of an event holds generated output.
        """
        self.path = path
        self._prompt = prompt
        self._has_token = has_token

    def body(self, request: BenchRequest, wire: Wire) -> dict[str, Any]:
        """Return the JSON body of a request to this route."""
        body = {
            "model": wire.model,
            **self._prompt(request),
            "max_tokens": request.output_len,
            "temperature": wire.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # `ignore_eos` is sent only on request, because OpenAI's own service refuses unknown keys.
        return {**body, "ignore_eos": True} if wire.ignore_eos else body

    def reader(self, record: RequestRecord) -> OnEvent:
        """Return a callback that reads each event of the answer into `record`."""
        decode = msgspec.json.Decoder(_OpenAIEvent).decode
        has_token = self._has_token

        def read(when: float, data: bytes) -> None:
            event = decode(data)
            if event.error is not None:
                record.error = describe_error(event.error)
                return
            usage = event.usage
            has_any = any(has_token(choice) for choice in event.choices)
            if usage is not None:
                _note_usage(record, usage, when, has_any)
            elif has_any:
                record.add(when, 1)
                record.output_tokens += 1

        return read


def _note_usage(record: RequestRecord, usage: _Usage, when: float, has_token: bool) -> None:
    # If every piece has `usage`, it counts the tokens so far. If only the last has, it is the
    # total.
    if has_token:
        new = max(usage.completion_tokens - sum(record.event_tokens), 1)
        record.add(when, new)
    record.prompt_tokens = usage.prompt_tokens
    record.output_tokens = usage.completion_tokens
    details = usage.prompt_tokens_details
    if details is not None and details.cached_tokens:
        record.cached_tokens = details.cached_tokens


def _completion_prompt(request: BenchRequest) -> dict[str, Any]:
    if request.messages is not None:
        raise HeadraceError("Completions take no messages; use --backend openai-chat.")
    return {"prompt": request.text if request.input_ids is None else request.input_ids}


def _chat_prompt(request: BenchRequest) -> dict[str, Any]:
    # A text is sent as a message of the user.
    if request.input_ids is not None:
        raise HeadraceError("Chat takes no token ids; give a --tokenizer for random text.")
    return {"messages": request.messages or [{"role": "user", "content": request.text}]}


_completions = partial(OpenAI, "/v1/completions", _completion_prompt, _completion_has_token)

BACKENDS: dict[str, Callable[[], Backend]] = {
    "headrace": Native,
    "sglang": Native,
    # The name that vLLM's benchmark uses for this route.
    "openai": _completions,
    "openai-completions": _completions,
    "openai-chat": partial(OpenAI, "/v1/chat/completions", _chat_prompt, _chat_has_token),
}


@dataclass(frozen=True)
class HttpTarget:
    """A `Target` that sends requests to a server over HTTP."""

    client: HttpClient
    backend: Backend
    wire: Wire

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Send one request and read its streamed answer into `record`."""
        body = {**self.backend.body(request, self.wire), **self.wire.extra}
        read = self.backend.reader(record)
        has_end = False

        def on_event(when: float, data: bytes) -> None:
            nonlocal has_end
            if data == _DONE:
                has_end = True
            else:
                read(when, data)

        await self.client.stream(self.backend.path, msgspec.json.encode(body), on_event)
        if not record.error and not (record.output_tokens and has_end):
            what = "broke off before [DONE]" if record.output_tokens else "held no tokens"
            record.error = f"The answer {what}."

    async def flush_cache(self) -> None:
        """Drop the server's prefix cache, if the server has a route for this.

        Raises:
            HeadraceError: the server refused to drop its cache.
        """
        if self.backend.flush_path is None:
            return
        status, text = await self.client.call("POST", self.backend.flush_path)
        if status != 200:
            raise HeadraceError(f"The cache was not flushed: {text[:200].decode(errors='replace')}")


async def first_model(client: HttpClient) -> str:
    """Return the name of the first model in a server's list of models.

    Raises:
        StartupError: the list is empty.
    """
    status, body = await client.call("GET", "/v1/models")
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise StartupError(
            f"/v1/models names no model (HTTP {status}); name it with --model."
        ) from None


def describe_error(error: Any) -> str:
    """Return the message of an error event as text."""
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error or "an event without tokens and without an error")
