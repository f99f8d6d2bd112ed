"""All streams of a server: one step's tokens in, one step's text out; no input or output here."""

from __future__ import annotations

import array
import logging
from collections.abc import Iterator, Sequence

import msgspec

from runtime.ipc.messages import (
    FinishReason,
    StopHit,
    StreamEnd,
    StreamStart,
    TextDelta,
    TextDeltas,
    TokenDeltas,
)
from runtime.text.decoder_choice import DecoderFactory
from runtime.text.text_stream import BLOCK_BYTES, Stream
from runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_ID_BYTES = 4
_PORTION_BYTES = 2**20


class MalformedDeltas(ValueError):
    """A message whose parts contradict each other; none of it was used."""


class Detokenizer:
    """The streams that are open, by request id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Decode with `tokenizer`."""
        self._decoders = DecoderFactory(tokenizer)
        self._streams: dict[int, Stream] = {}

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
        deltas: list[TextDelta] = []
        hits: list[int] = []
        for start, cached_tokens in zip(message.starts, message.cached_tokens, strict=True):
            if start.request_id not in self._streams:
                self._open(start, cached_tokens, deltas, hits)
        for block in message.extras:
            if (owner := self._streams.get(block.request_id)) is not None:
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
                    data[begin * _ID_BYTES : stop * _ID_BYTES],
                    None if end is None else end.reason,
                )
            except Exception:
                logger.exception("Decoding failed; request %d ends", request_id)
                delta = _failure(request_id)
            if delta is None:
                continue
            deltas.append(delta if end is None else _with_counts(delta, end))
            if delta.reason is not None:
                del self._streams[request_id]
                if end is None:
                    hits.append(request_id)
        for end in ends.values():
            self._close(end, deltas)
        return TextDeltas(deltas), StopHit(hits) if hits else None

    def _open(
        self, start: StreamStart, cached_tokens: int, deltas: list[TextDelta], hits: list[int]
    ) -> None:
        try:
            decoder = self._decoders.create(
                skip_special_tokens=start.skip_special_tokens,
                prompt_tail=_ids_of(start.prompt_tail),
            )
            self._streams[start.request_id] = Stream(start, cached_tokens, decoder)
        except Exception:
            logger.exception("Opening a stream failed; request %d ends", start.request_id)
            deltas.append(_failure(start.request_id))
            hits.append(start.request_id)

    def _close(self, end: StreamEnd, deltas: list[TextDelta]) -> None:
        # An end without tokens of its own in this step.
        request_id = end.request_id
        stream = self._streams.pop(request_id, None)
        if stream is None:
            return
        try:
            delta = stream.advance([], b"", end.reason)
        except Exception:
            logger.exception("Decoding failed; request %d ends", request_id)
            delta = _failure(request_id)
        if delta is not None:
            deltas.append(_with_counts(delta, end))


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
    if min(counts, default=0) < 0 or sum(counts) * _ID_BYTES != len(message.token_ids):
        raise MalformedDeltas("token counts do not add up")
    return _ids_of(message.token_ids), {end.request_id: end for end in message.ends}


def _failure(request_id: int) -> TextDelta:
    reason = FinishReason(
        "abort",
        message="The output of this request could not be decoded.",
        status_code=500,
        err_type="InternalServerError",
    )
    return TextDelta(request_id, "", b"", reason)
