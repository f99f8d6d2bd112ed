"""All streams of a server. It turns one step's tokens into one step's text, without I/O.

`Stream` is the state of one stream: its tokens, the text that was shown, when the next delta is
due.
"""

from __future__ import annotations

import array
import sys
import time
from collections.abc import Iterator, Sequence

import msgspec

from runtime.ipc.messages import (
    BeginTimes,
    FinishReason,
    StopHit,
    StreamEnd,
    StreamStart,
    TextDelta,
    TextDeltas,
    TokenDeltas,
    internal_error,
)
from runtime.requests.extra_spec import ExtraBlock, add_block
from runtime.requests.fault_domain import FaultDomains
from runtime.text.decoder_choice import DecoderFactory
from runtime.text.decoders import TextDecoder
from runtime.text.stop_search import StopSearch, stop_search
from runtime.text.thoughts import ThoughtScan
from runtime.text.tokenizer import Tokenizer

ID_BYTES = 4
_PORTION_BYTES = 2**20
# Tokens of a request without streaming that may wait to be decoded. Decoding all of them at the end
# would delay the next batch: 32,768 tokens took 13 milliseconds, 50 the first time.
MAX_UNDECODED = 16
# Extras are sent in portions, even without streaming: a message of a hundred megabytes would block
# the front while it is read.
_MAX_UNSENT_BYTES = 2**18
# Cost of reading one block, in bytes.
BLOCK_BYTES = 128


class MalformedDeltas(ValueError):
    """A message whose parts contradict each other; it is ignored as a whole."""


class Detokenizer:
    """The streams that are open, by request id.

    Attributes:
        is_midway: whether a step has begun to change streams and has not ended. A step that raised
            before that can be tried again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Decode with `tokenizer`."""
        self._decoders = DecoderFactory(tokenizer)
        self._streams: dict[int, Stream] = {}
        # An exception from a stream's text, stop patterns or extras ends only that stream.
        self._faults = FaultDomains(self._fail_in_step)
        self.is_midway = False
        # Deltas of the step that is being decoded.
        self._deltas: list[TextDelta] = []
        self._hits: list[int] = []

    @property
    def decoder_kind(self) -> str:
        """Kind of this tokenizer's decoder, for the log."""
        return self._decoders.kind

    @property
    def num_streams(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def reset(self) -> None:
        """Forget every stream."""
        self._streams.clear()

    def step(self, message: TokenDeltas) -> tuple[TextDeltas, StopHit | None]:
        """Decode one step of the whole batch.

        Requests that are unknown or have ended are ignored: the scheduler may be a step ahead of a
        stop string. A failure ends only its request.

        Returns:
            The deltas that are due, and the requests that have ended without the scheduler's
                knowledge.

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
        stream = Stream(start, cached_tokens, decoder)
        if start.output_ids:
            stream.go_on_after(_ids_of(start.output_ids), start.num_shown)
        self._streams[start.request_id] = stream

    def _close(self, end: StreamEnd) -> None:
        # The request ends without tokens in this step.
        stream = self._streams.get(end.request_id)
        if stream is None:
            return
        delta = stream.advance([], b"", end.reason)
        if delta is not None:
            self._deltas.append(_with_counts(delta, end))
        del self._streams[end.request_id]

    def fail(self, request_id: int, why: str) -> TextDelta:
        """Forget a stream that failed; return the delta that reports the failure."""
        self._streams.pop(request_id, None)
        return TextDelta(request_id, "", b"", internal_error(why))

    def _fail_in_step(self, request_id: int, why: str) -> None:
        self._deltas.append(self.fail(request_id, why))
        self._hits.append(request_id)


class Stream:
    """Turns one request's tokens into deltas, in order, each character once."""

    __slots__ = (
        "_admitted_at",
        "_cached_tokens",
        "_data",
        "_decoder",
        "_due",
        "_extras",
        "_first_token_at",
        "_interval",
        "_keep_stop",
        "_least",
        "_matcher",
        "_max_undecoded",
        "_num_bytes",
        "_num_hidden",
        "_num_tokens",
        "_num_unsent",
        "_request_id",
        "_scan",
        "_text",
        "_undecoded",
    )

    def __init__(self, start: StreamStart, cached_tokens: int, decoder: TextDecoder) -> None:
        """Begin a stream; `cached_tokens` goes out with its first delta."""
        self._request_id = start.request_id
        self._cached_tokens = cached_tokens
        self._admitted_at = start.admitted_at
        self._first_token_at = 0.0
        self._decoder = decoder
        self._keep_stop = start.no_stop_trim
        self._matcher = stop_search(start)
        # These are for the matcher only: where the answer begins, and how many tokens came.
        self._scan = ThoughtScan(start.thoughts) if start.thoughts is not None else None
        self._least = start.min_new_tokens
        self._num_tokens = 0
        # Unsent tokens that make a delta due: the first at once; without streaming, never.
        self._interval = max(1, start.stream_interval) if start.stream else sys.maxsize
        self._due = 1 if start.stream else sys.maxsize
        self._num_unsent = 0
        self._num_bytes = 0
        # Characters at the beginning of the next text that were sent before.
        self._num_hidden = 0
        self._undecoded: list[int] = []
        # This number differs by stream, so that streams that began together are not all decoded in
        # one step.
        self._max_undecoded = start.request_id % MAX_UNDECODED + 1
        self._data: list[bytes] = []
        self._text: list[str] = []
        self._extras: list[ExtraBlock] = []

    def go_on_after(self, token_ids: list[int], num_shown: int) -> None:
        """Take the tokens that an earlier process sent, with `num_shown` characters of text.

        Decoding these tokens together may give more text than was sent with them, or less; the text
        that follows begins after exactly `num_shown` characters.
        """
        self._undecoded += token_ids
        if self._matcher is not None:
            self._search(self._matcher, None)
        else:
            self._text.append(self._decode())
        self._num_hidden = num_shown
        # The first delta was sent with the first of these tokens.
        self._cached_tokens = -1
        self._due = self._interval

    def add_extra(self, block: ExtraBlock) -> None:
        """Add a block to the next delta."""
        add_block(self._extras, block)
        self._num_bytes += len(block.data) + BLOCK_BYTES

    def advance(
        self, token_ids: list[int], data: bytes, reason: FinishReason | None
    ) -> TextDelta | None:
        """Add one step's tokens.

        Args:
            token_ids: the new ids.
            data: the new ids as int32 bytes.
            reason: why the request ends with this step, if it does.

        Returns:
            A delta if one is due. A delta with a reason is the last one. The reason is the given
            one, or a stop string that was found.
        """
        if token_ids and not self._first_token_at:
            # Without streaming, the delta may come much later.
            self._first_token_at = time.monotonic()
        self._num_unsent += len(token_ids)
        self._undecoded += token_ids
        self._data.append(data)
        num_dropped = 0
        if self._matcher is not None:
            num_dropped, reason = self._search(self._matcher, reason)
        elif reason is not None:
            self._drop_stop_token(reason)
            self._text.append(self._decode())
            self._text.append(self._decoder.finish())
        is_due = self._num_unsent >= self._due or self._num_bytes > _MAX_UNSENT_BYTES
        if reason is None and not is_due:
            if len(self._undecoded) > self._max_undecoded:
                self._max_undecoded = MAX_UNDECODED
                # The newest token may turn out to be the stop token.
                newest = self._undecoded.pop()
                self._text.append(self._decode())
                self._undecoded.append(newest)
            return None
        if self._undecoded:
            self._text.append(self._decode())
        sent = b"".join(self._data)
        text = "".join(self._text)
        if self._num_hidden:
            text, self._num_hidden = text[self._num_hidden :], max(0, self._num_hidden - len(text))
        delta = TextDelta(
            self._request_id,
            text,
            sent[: len(sent) - ID_BYTES * num_dropped] if num_dropped else sent,
            reason,
            self._cached_tokens,
        )
        if self._cached_tokens >= 0:
            times = BeginTimes(self._admitted_at, self._first_token_at)
            delta = msgspec.structs.replace(delta, times=times)
        if self._extras:
            delta = msgspec.structs.replace(delta, extras=self._extras)
            self._extras = []
        self._cached_tokens = -1
        self._due = self._interval
        self._num_unsent = 0
        self._num_bytes = 0
        self._data.clear()
        self._text.clear()
        return delta

    def _decode(self) -> str:
        ids = self._undecoded
        text = self._decoder.push(ids[0]) if len(ids) == 1 else self._decoder.extend(ids)
        ids.clear()
        return text

    def _drop_stop_token(self, reason: FinishReason) -> int:
        # The token that ended the request is reported, but its text is not part of the answer.
        ids = self._undecoded
        if self._keep_stop or reason.type != "stop" or not isinstance(reason.matched, int):
            return 0
        if not ids or ids[-1] != reason.matched:
            return 0
        ids.pop()
        return 1

    def _search(
        self, matcher: StopSearch, reason: FinishReason | None
    ) -> tuple[int, FinishReason | None]:
        """Decode token by token; return the number of ids after a match, and the final reason."""
        num_hidden = self._drop_stop_token(reason) if reason is not None else 0
        ids = self._undecoded
        for index, token_id in enumerate(ids):
            self._num_tokens += 1
            self._look_through(matcher, self._decoder.push(token_id))
            if matcher.matched is not None:
                num_dropped = len(ids) - index - 1 + num_hidden
                ids.clear()
                return num_dropped, FinishReason("stop", matched=matcher.matched)
        ids.clear()
        if reason is None:
            return 0, None
        # The stop token is counted, too: it cannot come before `min_new_tokens` tokens.
        self._num_tokens += num_hidden
        self._look_through(matcher, self._decoder.finish(), is_end=True)
        if matcher.matched is None:
            self._text.append(matcher.finish(may_match=self._num_tokens > self._least))
        # An abort is reported even if the text happens to end with a stop.
        if matcher.matched is not None and reason.type != "abort":
            return num_hidden, FinishReason("stop", matched=matcher.matched)
        return 0, reason

    def _look_through(self, matcher: StopSearch, text: str, *, is_end: bool = False) -> None:
        """Add the part of new text that may be shown; stops are searched in the answer only."""
        may_match = self._num_tokens > self._least
        if self._scan is None:
            self._text.append(matcher.push(text, may_match=may_match))
            return
        parts = self._scan.feed(text) + (self._scan.finish() if is_end else [])
        for part in parts:
            if matcher.matched is None and part.is_answer:
                self._text.append(matcher.push(part.text, may_match=may_match))
            elif matcher.matched is None:
                self._text += (matcher.let_go(), part.text)


def portions(message: TextDeltas) -> Iterator[TextDeltas]:
    """Split the deltas into messages that are read in a millisecond or two; no deltas, no message.

    A thousand requests with log-probabilities that end in one step would block the front for a
    tenth of a second.
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
