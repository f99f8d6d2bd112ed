"""All streams of a server: one step's tokens in, one step's text out; no input or output here."""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence

import msgspec

from runtime.ipc.messages import (
    StopHit,
    StreamEnd,
    StreamStart,
    TextDelta,
    TextDeltas,
    TokenDeltas,
    internal_error,
)
from runtime.requests.fault_domain import FaultDomains
from runtime.text.decoder_choice import DecoderFactory
from runtime.text.text_stream import BLOCK_BYTES, Stream
from runtime.text.tokenizer import Tokenizer

ID_BYTES = 4
_PORTION_BYTES = 2**20


class MalformedDeltas(ValueError):
    """A message whose parts contradict each other; none of it was used."""


class Detokenizer:
    """The streams that are open, by request id.

    Attributes:
        is_midway: a step has begun to change streams and has not ended; one that raised at its
            entry can be taken again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Decode with `tokenizer`."""
        self._decoders = DecoderFactory(tokenizer)
        self._streams: dict[int, Stream] = {}
        # What a stream's own text, stop patterns or extras raise ends that stream alone.
        self._faults = FaultDomains(self._fail_in_step)
        self.is_midway = False
        # Of the step that is being decoded.
        self._deltas: list[TextDelta] = []
        self._hits: list[int] = []

    @property
    def decoder_kind(self) -> str:
        """How this tokenizer is decoded, for the log."""
        return self._decoders.kind

    @property
    def num_streams(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def reset(self) -> None:
        """Forget every stream."""
        self._streams.clear()

    def step(self, message: TokenDeltas) -> tuple[TextDeltas, StopHit | None]:
        """Decode one step of the whole batch.

        Unknown requests and those that have ended are ignored: the scheduler may be a step ahead
        of a stop string. A failure ends the request it belongs to.

        Returns:
            The deltas that are due, and the requests that the scheduler does not know to be over.

        Raises:
            MalformedDeltas: the message's lists do not fit together.
        """
        token_ids, ends = _checked(message)
        self._deltas, self._hits = deltas, hits = [], []
        self.is_midway = True
        for start, cached_tokens in zip(message.starts, message.cached_tokens, strict=True):
            if start.request_id not in self._streams:
                with self._faults.of(start.request_id):
                    self._open(start, cached_tokens)
        for block in message.extras:
            if (owner := self._streams.get(block.request_id)) is not None:
                with self._faults.of(block.request_id):
                    owner.add_extra(block)
        data = message.token_ids
        stop = 0
        for request_id, count in zip(message.request_ids, message.token_counts, strict=True):
            begin, stop = stop, stop + count
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            end = ends.pop(request_id, None) if ends else None
            try:
                delta = stream.advance(
                    token_ids[begin:stop],
                    data[begin * ID_BYTES : stop * ID_BYTES],
                    None if end is None else end.reason,
                )
                if delta is None:
                    continue
                deltas.append(delta if end is None else _with_counts(delta, end))
            except Exception as error:
                self._faults.failed(request_id, error)
                continue
            if delta.reason is not None:
                del self._streams[request_id]
                if end is None:
                    hits.append(request_id)
        for end in ends.values():
            with self._faults.of(end.request_id):
                self._close(end)
        self.is_midway = False
        return TextDeltas(deltas), StopHit(hits) if hits else None

    def _open(self, start: StreamStart, cached_tokens: int) -> None:
        decoder = self._decoders.create(
            skip_special_tokens=start.skip_special_tokens,
            prompt_tail=_ids_of(start.prompt_tail),
        )
        self._streams[start.request_id] = Stream(start, cached_tokens, decoder)

    def _close(self, end: StreamEnd) -> None:
        # An end without tokens of its own in this step.
        stream = self._streams.get(end.request_id)
        if stream is None:
            return
        delta = stream.advance([], b"", end.reason)
        if delta is not None:
            self._deltas.append(_with_counts(delta, end))
        del self._streams[end.request_id]

    def fail(self, request_id: int, why: str) -> TextDelta:
        """Forget a stream that failed; the delta that says so."""
        self._streams.pop(request_id, None)
        return TextDelta(request_id, "", b"", internal_error(why))

    def _fail_in_step(self, request_id: int, why: str) -> None:
        self._deltas.append(self.fail(request_id, why))
        self._hits.append(request_id)


def portions(message: TextDeltas) -> Iterator[TextDeltas]:
    """The same deltas in messages that are read in a millisecond or two; none where there are none.

    A thousand requests with log-probabilities that end in one step would hold the front for a tenth
    of a second.
    """
    begin = num_bytes = 0
    for index, delta in enumerate(message.deltas):
        if delta.extras is None:
            continue
        num_bytes += sum(len(block.data) + BLOCK_BYTES for block in delta.extras)
        if num_bytes > _PORTION_BYTES:
            yield TextDeltas(message.deltas[begin : index + 1])
            begin, num_bytes = index + 1, 0
    if begin < len(message.deltas):
        yield TextDeltas(message.deltas[begin:]) if begin else message


def _with_counts(delta: TextDelta, end: StreamEnd) -> TextDelta:
    if not end.num_retractions:
        return delta
    return msgspec.structs.replace(delta, num_retractions=end.num_retractions)


def _ids_of(data: bytes) -> list[int]:
    ids = array.array("i")
    ids.frombytes(data)
    return ids.tolist()


def _checked(message: TokenDeltas) -> tuple[list[int], dict[int, StreamEnd]]:
    counts: Sequence[int] = message.token_counts
    if len(message.starts) != len(message.cached_tokens) or len(message.request_ids) != len(counts):
        raise MalformedDeltas("lists of different length")
    if min(counts, default=0) < 0 or sum(counts) * ID_BYTES != len(message.token_ids):
        raise MalformedDeltas("token counts do not add up")
    return _ids_of(message.token_ids), {end.request_id: end for end in message.ends}
