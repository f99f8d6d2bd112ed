"""A journal of an answer's chunks, from which another server can continue the answer.

A server that gets the same request and the same chunks writes the same events. So the journal holds
only the chunks, in the order in which the endpoint read them. If the server dies, a second server
gets the same HTTP request with the journal. It reads the chunks from the journal, so it writes the
same events again. Then it continues where the first server was cut off.
"""

from __future__ import annotations

import array
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass

import msgspec

from runtime.client.generation_stream import GenerationChunk, Outcome
from runtime.ipc.messages import TextDelta

# An entry is the seed of a request, or a chunk. The chunk's `request_id` is the number of its
# stream.
_decoder = msgspec.msgpack.Decoder(int | TextDelta)
_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Repeated:
    """The functions through which a stream gets its recorded chunks again.

    Attributes:
        take: adds a chunk to the stream as if a process had sent it; returns false if the stream
            has ended.
        go_on: called once all streams have read their recorded chunks.
    """

    take: Callable[[TextDelta], bool]
    go_on: Callable[[], None]


class AnswerJournal:
    """The seeds and the chunks of all engine requests that one HTTP request makes."""

    def __init__(self, entries: Iterable[bytes] = ()) -> None:
        """Repeat `entries`, which come from the journal of an earlier server; then record new ones.

        Raises:
            msgspec.DecodeError: bytes that are not an entry.
        """
        self._seeds: deque[int] = deque()
        self._chunks: deque[TextDelta] = deque()
        for data in entries:
            entry = _decoder.decode(data)
            if isinstance(entry, int):
                self._seeds.append(entry)
            else:
                self._chunks.append(entry)
        self._unsent: list[bytes] = []
        self._num_streams = 0
        self._repeated: list[Repeated] = []
        # Whether the first of `_chunks` was passed to its stream and has not been read yet.
        self._is_taken = False

    @property
    def is_repeating(self) -> bool:
        """Whether some chunks of the earlier server have not been read yet."""
        return bool(self._chunks)

    def seed(self, new: Callable[[], int]) -> int:
        """Return the seed of the next request that has none: the earlier server's, or a new one."""
        if self._seeds:
            return self._seeds.popleft()
        seed = new()
        self._unsent.append(_encoder.encode(seed))
        return seed

    def open(self, repeated: Repeated) -> StreamJournal:
        """Return the journal of the next stream; its recorded chunks are repeated first.

        Args:
            repeated: the stream's functions; not used if there is nothing to repeat.
        """
        number = self._num_streams
        self._num_streams += 1
        if self._chunks:
            self._repeated.append(repeated)
            self._give()
        return StreamJournal(self, number)

    def take_unsent(self) -> list[bytes]:
        """Return what was added since the last call."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def read(self, number: int, chunk: GenerationChunk) -> None:
        """Note that a chunk of a stream was read."""
        if self._chunks:
            self._done_with(number)
            return
        entry = TextDelta(
            number,
            chunk.text,
            array.array("i", chunk.token_ids).tobytes(),
            chunk.finish_reason,
            chunk.cached_tokens,
            chunk.num_retractions,
            list(chunk.extras) or None,
        )
        self._unsent.append(_encoder.encode(entry))

    def end(self, number: int) -> None:
        """Note that a stream is not read any further."""
        self._done_with(number)

    def _done_with(self, number: int) -> None:
        if self._is_taken and self._chunks[0].request_id == number:
            self._chunks.popleft()
            self._is_taken = False
            self._give()

    def _give(self) -> None:
        """Pass the next recorded chunk to its stream, if it is open.

        After the last recorded chunk, let all streams continue with new output.
        """
        while self._chunks and not self._is_taken:
            chunk = self._chunks[0]
            if chunk.request_id >= len(self._repeated):
                return
            self._is_taken = self._repeated[chunk.request_id].take(chunk)
            if not self._is_taken:
                self._chunks.popleft()
        if not self._chunks:
            for each in self._repeated:
                each.go_on()
            self._repeated = []


class StreamJournal:
    """Notes the chunks that are read from one stream."""

    def __init__(self, journal: AnswerJournal, number: int) -> None:
        """Record chunks in `journal` under the stream's number."""
        self._journal = journal
        self._number = number

    def add(self, chunk: GenerationChunk) -> None:
        """Note that a chunk was read."""
        self._journal.read(self._number, chunk)

    def end(self, outcome: Outcome) -> None:
        """Note that the stream is not read any further."""
        del outcome
        self._journal.end(self._number)


# Set for a request whose answer another server may have to go on with.
JOURNAL: ContextVar[AnswerJournal | None] = ContextVar("journal", default=None)
