"""Records the times and tokens of each request, for metrics and for the request log.

The client makes a record of every request if a sink (a receiver of records) is registered, so
endpoints need no code for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.client.generation_stream import GenerationChunk, GenerationInput, Outcome
from runtime.requests.request_context import REQUEST, RequestContext
from runtime.requests.sampling_params import SamplingParams


@dataclass(slots=True)
class RequestRecord:
    """One request, from its arrival to its last chunk. Times are `time.monotonic()`, seconds.

    Attributes:
        input_ids: the prompt's ids; empty if embeddings were sent.
        sampling: the sampling parameters as requested.
        admitted_at: when the request left the queue; `None` if it never did.
        first_token_at: when the first token was read here. For an answer that is not streamed: when
            the token was generated.
        outcome: how the request ended; `disconnect` if it was not read to the end.
        token_gaps: for each chunk after the first, the seconds since the previous chunk and the
            number of its tokens.
        text: pieces of the output, if the client keeps them.
        context: the HTTP request that this request belongs to, if any.
    """

    rid: str
    is_streaming: bool
    prompt_tokens: int
    started_at: float
    input_ids: list[int]
    sampling: SamplingParams
    cached_tokens: int = 0
    completion_tokens: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    ended_at: float = 0.0
    outcome: Outcome = "error"
    token_gaps: list[tuple[float, int]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    context: RequestContext | None = None

    @property
    def e2e_s(self) -> float:
        """Seconds from arrival to the end."""
        return self.ended_at - self.started_at

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token; `None` without a token."""
        return None if self.first_token_at is None else self.first_token_at - self.started_at

    def stages(self) -> dict[str, float]:
        """Return the seconds of each completed stage, by SGLang's names of the stages."""
        seconds = {}
        if self.admitted_at is not None:
            seconds["prefill_waiting"] = self.admitted_at - self.started_at
            if self.first_token_at is not None:
                seconds["prefill_forward"] = self.first_token_at - self.admitted_at
                seconds["decode_loop"] = self.last_token_at - self.first_token_at
        return seconds

    def add(self, chunk: GenerationChunk) -> None:
        """Count a chunk's tokens and record when they arrived."""
        now = time.monotonic()
        num_tokens = len(chunk.token_ids)
        self.prompt_tokens = chunk.prompt_tokens
        self.cached_tokens = chunk.cached_tokens
        times = chunk.times
        if times is not None:
            self.admitted_at = times.admitted_at or None
        if not num_tokens:
            return
        if self.first_token_at is None:
            self.first_token_at = now
            if times is not None and not self.is_streaming:
                # The whole answer is one chunk, whose first token was generated long before.
                self.first_token_at = times.first_token_at
        else:
            self.token_gaps.append((now - self.last_token_at, num_tokens))
        self.completion_tokens += num_tokens
        self.last_token_at = now


RecordSink = Callable[[RequestRecord], None]


class Recording:
    """Keeps the record of one stream, and passes it to the sinks when the stream ends."""

    def __init__(
        self,
        item: GenerationInput,
        started_at: float,
        sinks: Sequence[RecordSink],
        *,
        keeps_text: bool,
    ) -> None:
        """Begin the record of `item`, which arrived at `started_at` (`time.monotonic()`)."""
        self._record = RequestRecord(
            rid=item.spec.rid,
            is_streaming=item.spec.stream,
            prompt_tokens=len(item.input_ids),
            started_at=started_at,
            # With embeddings, the ids are only placeholders.
            input_ids=[] if item.spec.input_embeds else item.input_ids,
            sampling=item.spec.sampling,
            context=REQUEST.get(),
        )
        self._sinks = sinks
        self._keeps_text = keeps_text

    def add(self, chunk: GenerationChunk) -> None:
        """Count a chunk that was read."""
        self._record.add(chunk)
        if self._keeps_text:
            self._record.text.append(chunk.text)

    def end(self, outcome: Outcome) -> None:
        """Complete the record and pass it to the sinks."""
        self._record.outcome = outcome
        self._record.ended_at = time.monotonic()
        for sink in self._sinks:
            sink(self._record)
