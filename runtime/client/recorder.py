"""Records the times and tokens of each request as the client sees them, for sinks.

While the client has sinks it records every request, so endpoints need no code for metrics or for
the request log.
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
    """One request, from its arrival to its last chunk; times are `time.monotonic()`.

    Attributes:
        input_ids, sampling: the prompt's ids and the sampling parameters as requested; no ids if
            embeddings were sent.
        admitted_at: when the request left the queue; `None` if it never did.
        first_token_at: when the first token was read here, or, if the answer is not streamed, when
            it was generated.
        outcome: how the request ended; `disconnect` if it was not read to the end.
        token_gaps: (seconds, tokens) for each chunk after the first.
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
        """Seconds of each completed stage, under SGLang's names."""
        seconds = {}
        if self.admitted_at is not None:
            seconds["prefill_waiting"] = self.admitted_at - self.started_at
            if self.first_token_at is not None:
                seconds["prefill_forward"] = self.first_token_at - self.admitted_at
                seconds["decode_loop"] = self.last_token_at - self.first_token_at
        return seconds

    def add(self, chunk: GenerationChunk) -> None:
        """Count a chunk's tokens and note when they arrived."""
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
                # This is the only chunk, and its first token was generated long before.
                self.first_token_at = times.first_token_at
        else:
            self.token_gaps.append((now - self.last_token_at, num_tokens))
        self.completion_tokens += num_tokens
        self.last_token_at = now


RecordSink = Callable[[RequestRecord], None]


class Recording:
    """Keeps the record of one stream and hands it to `sinks` at the end."""

    def __init__(
        self,
        item: GenerationInput,
        started_at: float,
        sinks: Sequence[RecordSink],
        *,
        keeps_text: bool,
    ) -> None:
        """Begin the record of `item`, which was taken at `started_at`."""
        self._record = RequestRecord(
            rid=item.spec.rid,
            is_streaming=item.spec.stream,
            prompt_tokens=len(item.input_ids),
            started_at=started_at,
            # With embeddings, the ids have no meaning.
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
