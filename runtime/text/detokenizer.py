"""Turns the tokens of one step into the text of one step, for all streams, without I/O.

`Stream` is the state of one request: its tokens, the text that was sent, and when the next part is
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
# The most undecoded tokens of a request without streaming. Decoding all of its tokens at the end
# would delay the next step: 32,768 tokens took 13 ms, and 50 ms the first time.
MAX_UNDECODED = 16
# Bytes. Extras are sent when they have so many bytes, even without streaming: reading a message of
# a hundred megabytes would block the front process.
_MAX_UNSENT_BYTES = 2**18
# Bytes that count for reading one block, besides its data.
BLOCK_BYTES = 128


class MalformedDeltas(ValueError):
    """The parts of a message contradict each other; the whole message is ignored."""


class Detokenizer:
    """The streams of all requests that run, by request id.

    Attributes:
        is_midway: whether a step has begun to change streams and has not ended. If a step fails
            before it has changed a stream, it can be tried again.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Begin without streams; text is decoded by `tokenizer`."""
        self._decoders = DecoderFactory(tokenizer)
        self._streams: dict[int, Stream] = {}
        # An exception in handling one request's text, stop patterns or extras ends only it.
        self._faults = FaultDomains(self._fail_in_step)
        self.is_midway = False
        # The results of the step that is being handled.
        self._deltas: list[TextDelta] = []
        self._hits: list[int] = []

    @property
    def decoder_kind(self) -> str:
        """Kind of this tokenizer's decoders, for the log."""
        return self._decoders.kind

    @property
    def num_streams(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def reset(self) -> None:
        """Forget all streams."""
        self._streams.clear()

    def step(self, message: TokenDeltas) -> tuple[TextDeltas, StopHit | None]:
        """Handle one step of the whole batch.

        Requests that are unknown or have ended are ignored, because the scheduler may be a step
        ahead when a stop string ends a request. A failure ends only its request.

        Returns:
            The deltas that are due, and the requests that ended here, which the scheduler does not
            know yet.

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
        # The request ends in this step without a new token.
        stream = self._streams.get(end.request_id)
        if stream is None:
            return
        delta = stream.advance([], b"", end.reason)
        if delta is not None:
            self._deltas.append(_with_counts(delta, end))
        del self._streams[end.request_id]

    def fail(self, request_id: int, why: str) -> TextDelta:
        """Forget a request that failed; return the delta that reports the failure."""
        self._streams.pop(request_id, None)
        return TextDelta(request_id, "", b"", internal_error(why))

    def _fail_in_step(self, request_id: int, why: str) -> None:
        self._deltas.append(self.fail(request_id, why))
        self._hits.append(request_id)


class Stream:
    """Turns one request's tokens into deltas, in order; each character is sent once."""

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
        """Begin a stream; its first delta reports `cached_tokens`."""
        self._request_id = start.request_id
        self._cached_tokens = cached_tokens
        self._admitted_at = start.admitted_at
        self._first_token_at = 0.0
        self._decoder = decoder
        self._keep_stop = start.no_stop_trim
        self._matcher = stop_search(start)
        # These three are used for stop strings only. `_scan` finds thoughts, because a stop string
        # in a thought does not count. `_num_tokens` is the number of tokens so far; stop strings
        # count once it is above `_least`.
        self._scan = ThoughtScan(start.thoughts) if start.thoughts is not None else None
        self._least = start.min_new_tokens
        self._num_tokens = 0
        # Number of unsent tokens that make a delta due. The first token is sent at once; without
        # streaming, tokens are sent only at the end.
        self._interval = max(1, start.stream_interval) if start.stream else sys.maxsize
        self._due = 1 if start.stream else sys.maxsize
        self._num_unsent = 0
        self._num_bytes = 0
        # Characters at the beginning of the next text that another process has sent already.
        self._num_hidden = 0
        self._undecoded: list[int] = []
        # The first bound differs by request, so that requests that began together are not all
        # decoded in the same step.
        self._max_undecoded = start.request_id % MAX_UNDECODED + 1
        self._data: list[bytes] = []
        self._text: list[str] = []
        self._extras: list[ExtraBlock] = []

    def go_on_after(self, token_ids: list[int], num_shown: int) -> None:
        """Take the tokens that an earlier process sent, with `num_shown` characters of text.

        Decoding these tokens again, all together, may give more text than was sent, or less. The
        next text begins after exactly `num_shown` characters.
        """
        self._undecoded += token_ids
        if self._matcher is not None:
            self._search(self._matcher, None)
        else:
            self._text.append(self._decode())
        self._num_hidden = num_shown
        # The first delta was sent by the earlier process.
        self._cached_tokens = -1
        self._due = self._interval

    def add_extra(self, block: ExtraBlock) -> None:
        """Add a block of an extra to the next delta."""
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
            A delta if one is due, else `None`. A delta with a reason is the last one. Its reason is
            `reason`, or a stop string that was found.
        """
        if token_ids and not self._first_token_at:
            # The time is taken now, because without streaming the delta comes much later.
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
                # The newest token stays undecoded: it may turn out to be the stop token.
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
        # A stop token is reported as a token, but its text does not belong to the answer. Returns
        # the number of such tokens, 0 or 1.
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
        """Decode token by token; return how many ids come after a match, and the final reason."""
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
        # A stop token counts too; it comes only after `min_new_tokens` tokens.
        self._num_tokens += num_hidden
        self._look_through(matcher, self._decoder.finish(), is_end=True)
        if matcher.matched is None:
            self._text.append(matcher.finish(may_match=self._num_tokens > self._least))
        # An aborted request is reported as aborted, even if its text ends with a stop string.
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
    """Split a message into messages that the front process can read in a millisecond or two.

    If a thousand requests with log-probabilities end in one step, a single message would block the
    front for a tenth of a second. A message without deltas gives no message.
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
