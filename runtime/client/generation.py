"""One sample: what is asked for, and the stream of what comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from runtime.client.hidden_states import read_hidden
from runtime.client.logprobs import PositionLogprobs, read_blocks, unsent_ids
from runtime.client.replica_link import ReplicaLink
from runtime.client.sessions import Turn
from runtime.errors import HeadraceError, InvalidRequest, Overloaded
from runtime.ipc.messages import (
    BeginTimes,
    FinishReason,
    HiddenBlock,
    HiddenMode,
    LogprobBlock,
    LogprobSpec,
)
from runtime.requests.sampling_params import SamplingParams


@dataclass(kw_only=True)
class GenerationInput:
    """One sample to generate, as the endpoints hand it over.

    Attributes:
        rid: the caller's name for it, unique among the requests in flight.
        input_ids: the prompt's token ids.
        sampling: checked parameters (`n` is unrolled by the caller: one input per sample).
        stream: whether deltas are wanted as they come; else one chunk at the end.
        explicit_max_new_tokens: whether the client itself named `max_new_tokens`.
        logprobs: set when log-probabilities are wanted.
        hidden_states: which hidden states are wanted.
        input_embeds: float32 bytes, one row for each of `input_ids`, which mean nothing then.
        dp_rank: the replica to run on; `None` leaves it to the router.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    stream: bool
    explicit_max_new_tokens: bool = True
    cache_namespace: str = ""
    priority: int = 0
    logprobs: LogprobSpec | None = None
    hidden_states: HiddenMode = ""
    input_embeds: bytes = b""
    dp_rank: int | None = None


@dataclass
class GenerationChunk:
    """What is new since the chunk before.

    Attributes:
        text: new characters.
        token_ids: new tokens.
        finish_reason: set on the last chunk.
        prompt_tokens, cached_tokens: of the whole request, the same in every chunk.
        num_retractions: times the request was put back and recomputed, known with the last chunk.
        input_logprobs: of the prompt's tokens after the first that is reported.
        output_logprobs: one for each of `token_ids`, when they are wanted.
        unsent_ids: where no token is to be generated, the one that `output_logprobs` is about.
        input_hidden, output_hidden: float32 bytes of hidden states, row after row.
        weight_version: label of the weights that were loaded when the newest token came.
        times: when the request left the queue and had its first token.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int
    cached_tokens: int
    num_retractions: int = 0
    input_logprobs: Sequence[PositionLogprobs] = ()
    output_logprobs: Sequence[PositionLogprobs] = ()
    unsent_ids: Sequence[int] = ()
    input_hidden: Sequence[bytes] = ()
    output_hidden: Sequence[bytes] = ()
    weight_version: str = ""
    times: BeginTimes | None = None


@dataclass
class StreamState:
    """What a request in flight has brought and nobody has read yet; the client's own."""

    request_id: int
    rid: str
    prompt_tokens: int
    arrival: float
    link: ReplicaLink
    cached_tokens: int = 0
    num_retractions: int = 0
    # Deltas that wait to be read; a reader that falls behind gets them joined, so memory stays
    # bounded by the text itself.
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobBlock] = field(default_factory=list)
    hidden: list[HiddenBlock] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: HeadraceError | None = None
    weight_version: str = ""
    times: BeginTimes | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class StreamOwner(Protocol):
    """What a stream needs of the client that made it."""

    def abort_ids(self, request_ids: list[int]) -> None:
        """Abort by internal id."""
        ...

    def forget(self, request_id: int) -> None:
        """Drop a stream that is over or no longer read."""
        ...


class GenerationStream:
    """An async iterator of chunks; leaving it early aborts the request.

    Attributes:
        turn: its place in a session, which learns what is read here.
    """

    turn: Turn | None = None

    def __init__(self, client: StreamOwner, stream: StreamState) -> None:
        """Made by `EngineClient.generate` only."""
        self._client = client
        self._stream = stream
        self._done = False

    @property
    def rid(self) -> str:
        """The caller's name for the request."""
        return self._stream.rid

    @property
    def arrival(self) -> float:
        """`time.monotonic()` when the client took the request."""
        return self._stream.arrival

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt as it was admitted."""
        return self._stream.prompt_tokens

    @property
    def dp_rank(self) -> int:
        """The replica that runs the request."""
        return self._stream.link.rank

    def __aiter__(self) -> AsyncIterator[GenerationChunk]:
        return self

    async def __anext__(self) -> GenerationChunk:
        if self._done:
            raise StopAsyncIteration
        stream = self._stream
        try:
            await stream.wake.wait()
        except asyncio.CancelledError:
            self.close()
            raise
        stream.wake.clear()
        if stream.error is not None:
            self._done = True
            self._client.forget(stream.request_id)
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
        if stream.logprobs:
            chunk.input_logprobs = read_blocks(stream.logprobs, is_input=True)
            # A stop string cuts tokens off; what stands behind the last one is cut here.
            outputs = read_blocks(stream.logprobs, is_input=False)
            chunk.unsent_ids = unsent_ids(stream.logprobs)
            chunk.output_logprobs = outputs[: len(chunk.token_ids) or len(chunk.unsent_ids)]
            stream.logprobs = []
        if stream.hidden:
            chunk.input_hidden = read_hidden(stream.hidden, is_input=True)
            chunk.output_hidden = read_hidden(stream.hidden, is_input=False)
            stream.hidden = []
        stream.text, stream.token_ids = [], []
        if self.turn is not None:
            self.turn.add_output(chunk.token_ids)
        if chunk.finish_reason is not None:
            self._done = True
            self._client.forget(stream.request_id)
            _raise_if_refused(chunk)
        return chunk

    def close(self) -> None:
        """Stop reading; a request that still runs is aborted."""
        if not self._done:
            self._done = True
            self._client.abort_ids([self._stream.request_id])
            self._client.forget(self._stream.request_id)

    def take_back(self) -> None:
        """Close it as if it had never been: its session forgets it, too."""
        self.close()
        if self.turn is not None:
            self.turn.session.forget(self.turn)


def _raise_if_refused(chunk: GenerationChunk) -> None:
    # The scheduler refuses with a status; a caller's own abort has none and keeps its text.
    reason = chunk.finish_reason
    if reason is None or reason.status_code is None:
        return
    message = reason.message or "The request was refused."
    if reason.status_code == 503:
        raise Overloaded(message)
    if 400 <= reason.status_code < 500:
        raise InvalidRequest(message)
    error = HeadraceError(message)
    error.status_code = reason.status_code
    raise error
