"""The stream of one sample's output, and the sample's request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from runtime.client.replica_link import ReplicaLink
from runtime.client.request_history import RequestTrace
from runtime.client.session_store import Turn
from runtime.errors import HeadraceError, InvalidRequest, Overloaded
from runtime.ipc.messages import BeginTimes, FinishReason, GenerateRequest
from runtime.requests.extra_spec import ExtraBlock
from runtime.requests.request_spec import RequestSpec

# How a request ended: by a finish reason, by an error, or because its reader stopped reading.
Outcome = Literal["stop", "length", "abort", "error", "disconnect"]


@dataclass
class GenerationInput:
    """One sample to generate, as endpoints pass it to `EngineClient.generate`.

    Attributes:
        input_ids: the prompt's token ids.
        spec: all other data of the request.
    """

    input_ids: list[int]
    spec: RequestSpec


@dataclass(slots=True)
class GenerationChunk:
    """The new output since the previous chunk.

    Attributes:
        text: new characters.
        token_ids: new tokens.
        finish_reason: set on the last chunk.
        prompt_tokens, cached_tokens: counts of the whole request, the same in every chunk.
        num_retractions: how often the request was retracted, that is, lost its pages and was
            recomputed; known with the last chunk.
        extras: data of the requested extras, in order; each extra's own code reads its blocks. If a
            stop string ended the output, some data may belong to tokens after the last of
            `token_ids`.
        weight_version: label of the weights that were loaded when the newest token was sampled.
        times: when the request left the queue and when it had its first token.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    num_retractions: int = 0
    extras: Sequence[ExtraBlock] = ()
    weight_version: str = ""
    times: BeginTimes | None = None

    def blocks(self, extra: str, *, is_input: bool) -> list[ExtraBlock]:
        """Return the data of one extra, either about the prompt or about the output."""
        return [
            block for block in self.extras if block.extra == extra and block.is_input == is_input
        ]

    def unsent_ids(self, extra: str) -> list[int]:
        """Return the token ids that the extra output `extra` reports beyond `token_ids`.

        With `max_new_tokens` 0 this is the id of the next token, which was sampled but is not sent
        as output. Otherwise the list is empty.
        """
        blocks = self.blocks(extra, is_input=False)
        return [each for block in blocks for each in memoryview(block.unsent_ids).cast("i")]


class Wake:
    """An event for the only reader of a stream, set while there is unread output.

    Attributes:
        is_set: whether there is unread output.
        listener: called whenever the event is set.
    """

    __slots__ = ("_waiting", "is_set", "listener")

    def __init__(self) -> None:
        """Begin with the event not set."""
        self.is_set = False
        self.listener: Callable[[], None] | None = None
        self._waiting: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiting reader and call the listener."""
        self.is_set = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
        if self.listener is not None:
            self.listener()

    def until_set(self) -> asyncio.Future[None]:
        """Return a new future that `set` completes; call it only while the event is not set."""
        self._waiting = asyncio.get_running_loop().create_future()
        return self._waiting


@dataclass(slots=True)
class StreamState:
    """A request in flight and its unread output; only the client and the stream use it.

    Attributes:
        request: the message to the scheduler. Its id changes when another process takes the
            request over.
        name: the tenant, and the request's `rid`.
        grammar: key and compiled form of the constraint; `None` if the output is not constrained.
        sent_ids: int32 bytes, all output tokens that have arrived here, read or not.
        num_shown: number of characters that arrived with those tokens.
        is_resumed: whether a process that ran the request has died.
        num_deaths: how many processes died while they ran the request.
        held_since: `time.monotonic()` of the latest such death; 0 once new output has arrived.
    """

    request: GenerateRequest
    name: tuple[str, str]
    prompt_tokens: int
    arrival: float
    link: ReplicaLink
    trace: RequestTrace
    num_pixel_bytes: int = 0
    grammar: tuple[bytes, bytes] | None = None
    sent_ids: bytearray = field(default_factory=bytearray)
    num_shown: int = 0
    is_resumed: bool = False
    num_deaths: int = 0
    held_since: float = 0.0
    cached_tokens: int = 0
    num_retractions: int = 0
    # Unread output. It is joined until it is read, so a slow reader costs no more memory than the
    # text itself.
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    extras: list[ExtraBlock] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: HeadraceError | None = None
    weight_version: str = ""
    times: BeginTimes | None = None
    wake: Wake = field(default_factory=Wake)

    @property
    def request_id(self) -> int:
        """The engine's id of the request."""
        return self.request.request_id

    @property
    def adapter_id(self) -> int:
        """The id of the request's adapter, 0 for none."""
        return self.request.spec.row.adapter_id

    @property
    def is_open(self) -> bool:
        """Whether the stream has neither an end nor an error."""
        return self.finish_reason is None and self.error is None

    def fail(self, error: HeadraceError) -> None:
        """End the stream with an error."""
        self.error = error
        self.wake.set()

    def join_link(self) -> None:
        """Count this stream among the requests of its replica."""
        self.link.num_in_flight += 1
        self.link.num_prompt_tokens += self.prompt_tokens

    def leave_link(self) -> None:
        """Undo `join_link`."""
        self.link.num_in_flight -= 1
        self.link.num_prompt_tokens -= self.prompt_tokens


class StreamOwner(Protocol):
    """The methods of `EngineClient` that a stream calls."""

    def abort_ids(self, request_ids: list[int]) -> None:
        """Abort requests by their internal ids."""
        ...

    def forget(self, request_id: int) -> None:
        """Drop the stream of a request that has ended, or that is no longer read."""
        ...


class StreamReader(Protocol):
    """An observer of the chunks that are read from a stream."""

    def add(self, chunk: GenerationChunk) -> None:
        """Handle a chunk that was read."""
        ...

    def end(self, outcome: Outcome) -> None:
        """Handle the end of the stream; called once."""
        ...


class GenerationStream:
    """An async iterator of a sample's chunks. Closing it early aborts the request.

    Attributes:
        turn: the request's place in a session; tokens that are read here are added to it.
        recording: records the request's times and tokens; `None` if the request is not recorded.
        journal: records what another server would need to continue the answer; `None` if there is
            no other server.
    """

    turn: Turn | None = None
    recording: StreamReader | None = None
    journal: StreamReader | None = None

    def __init__(self, client: StreamOwner, stream: StreamState) -> None:
        """Read from `stream`; only `EngineClient.generate` calls this."""
        self._client = client
        self._stream = stream
        self._done = False

    @property
    def rid(self) -> str:
        """The caller's name for the request."""
        return self._stream.name[1]

    @property
    def arrival(self) -> float:
        """`time.monotonic()` when the client took the request."""
        return self._stream.arrival

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt, as admitted."""
        return self._stream.prompt_tokens

    @property
    def dp_rank(self) -> int:
        """Number of the replica that runs the request."""
        return self._stream.link.rank

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a chunk can be read, also now if one can be read already."""
        self._stream.wake.listener = listener
        if self._stream.wake.is_set:
            listener()

    def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        return self

    async def __anext__(self) -> GenerationChunk:
        if self._done:
            raise StopAsyncIteration
        stream = self._stream
        try:
            if not stream.wake.is_set:
                await stream.wake.until_set()
        except asyncio.CancelledError:
            self.close()
            raise
        stream.wake.is_set = False
        if stream.error is not None:
            self._end("error")
            raise stream.error
        chunk = GenerationChunk(
            text="".join(stream.text),
            token_ids=stream.token_ids,
            finish_reason=stream.finish_reason,
            prompt_tokens=stream.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            num_retractions=stream.num_retractions,
            weight_version=stream.weight_version,
            times=stream.times,
        )
        if stream.extras:
            chunk.extras, stream.extras = stream.extras, []
        stream.text, stream.token_ids = [], []
        if self.turn is not None:
            self.turn.add_output(chunk.token_ids)
        reason = chunk.finish_reason
        if reason is not None and (refusal := _refusal(reason)) is not None:
            self._end("error")
            raise refusal
        if self.recording is not None:
            self.recording.add(chunk)
        if self.journal is not None:
            self.journal.add(chunk)
        if reason is not None:
            self._end(reason.type)
        return chunk

    def close(self) -> None:
        """Stop reading; a request that still runs is aborted."""
        if not self._done:
            self._client.abort_ids([self._stream.request_id])
            self._end("disconnect")

    def _end(self, outcome: Outcome) -> None:
        self._done = True
        self._stream.trace.outcome = outcome
        self._client.forget(self._stream.request_id)
        if self.recording is not None:
            self.recording.end(outcome)
        if self.journal is not None:
            self.journal.end(outcome)

    def take_back(self) -> None:
        """Undo the admission: close the stream and remove the request from its session."""
        self.close()
        if self.turn is not None:
            self.turn.session.forget(self.turn)


def _refusal(reason: FinishReason) -> HeadraceError | None:
    # A refusal by the scheduler has a status code and becomes an error. An abort by a caller has no
    # status code and ends the stream normally.
    if reason.status_code is None:
        return None
    message = reason.message or "The request was refused."
    if reason.status_code == 503:
        return Overloaded(message)
    if 400 <= reason.status_code < 500:
        return InvalidRequest(message)
    error = HeadraceError(message)
    error.status_code = reason.status_code
    return error
