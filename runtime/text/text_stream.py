"""One stream's state: what came in, what was shown, when the next delta is due."""

from __future__ import annotations

import sys
import time

import msgspec

from runtime.ipc.messages import BeginTimes, FinishReason, StreamStart, TextDelta
from runtime.requests.extra_spec import ExtraBlock, add_block
from runtime.text.decoders import TextDecoder
from runtime.text.stop_patterns import StopSearch, stop_search
from runtime.text.thoughts import ThoughtScan

_ID_BYTES = 4
# Tokens that wait to be decoded, where nobody waits for their text. All of them at the end would
# keep the next batch waiting: 32,768 tokens took 13 milliseconds, 50 the first time.
MAX_UNDECODED = 16
# Extras go out in portions, also where nobody streams: a message of a hundred megabytes would hold
# the front for as long as it takes to read.
_MAX_UNSENT_BYTES = 2**18
# What a block costs whoever reads it, as bytes.
BLOCK_BYTES = 128


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
        # For the matcher alone: where the answer is, and how many tokens came.
        self._scan = ThoughtScan(start.thoughts) if start.thoughts is not None else None
        self._least = start.min_new_tokens
        self._num_tokens = 0
        # Unsent tokens that make a delta due: the first at once; never where nobody streams.
        self._interval = max(1, start.stream_interval) if start.stream else sys.maxsize
        self._due = 1 if start.stream else sys.maxsize
        self._num_unsent = 0
        self._num_bytes = 0
        self._undecoded: list[int] = []
        # Streams that began together are decoded one after the other.
        self._max_undecoded = start.request_id % MAX_UNDECODED + 1
        self._data: list[bytes] = []
        self._text: list[str] = []
        self._extras: list[ExtraBlock] = []

    def add_extra(self, block: ExtraBlock) -> None:
        """Take what goes out with the next delta."""
        add_block(self._extras, block)
        self._num_bytes += len(block.data) + BLOCK_BYTES

    def advance(
        self, token_ids: list[int], data: bytes, reason: FinishReason | None
    ) -> TextDelta | None:
        """Take one step's tokens.

        Args:
            token_ids: the new ids.
            data: the same as int32 bytes.
            reason: why the request ends with this step, if it does.

        Returns:
            A delta when one is due. One with a reason is the last: the given reason, or a stop
            string that was found.
        """
        if token_ids and not self._first_token_at:
            # Where nobody streams, the delta may come long after.
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
                # The newest may turn out to be what ended the request.
                newest = self._undecoded.pop()
                self._text.append(self._decode())
                self._undecoded.append(newest)
            return None
        if self._undecoded:
            self._text.append(self._decode())
        sent = b"".join(self._data)
        delta = TextDelta(
            self._request_id,
            "".join(self._text),
            sent[: len(sent) - _ID_BYTES * num_dropped] if num_dropped else sent,
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
        """Decode token by token; how many ids lie behind a match, and the reason that holds now."""
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
        # Stop ids have waited for so many tokens as well.
        self._num_tokens += num_hidden
        self._look_through(matcher, self._decoder.finish(), is_end=True)
        if matcher.matched is None:
            self._text.append(matcher.finish(may_match=self._num_tokens > self._least))
        # What went wrong is said even where the text happens to end as it was asked to.
        if matcher.matched is not None and reason.type != "abort":
            return num_hidden, FinishReason("stop", matched=matcher.matched)
        return 0, reason

    def _look_through(self, matcher: StopSearch, text: str, *, is_end: bool = False) -> None:
        """Add what may be shown of more text; stops are looked for in the answer alone."""
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
