"""Makes `logprobs.content` of chat answers: one entry for each token of the answer's content.

The text of an output is divided in three ways: into tokens, into thoughts and answer, and (by the
tool-call parser) into content and calls. Positions in the text say how these parts correspond.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from openai_api.logprobs import chat_token
from openai_api.output_parser import ContentText, OutputEvent, ReasoningText
from openai_api.reasoning_parsers.think_tags import OPEN_TAG
from runtime.client.generation_stream import GenerationChunk
from runtime.eventloop.json_pieces import BATCH, Pieces
from runtime.extras.logprobs.positions import LogprobRows, outputs_of
from runtime.text.decoders import TextDecoder
from runtime.text.thoughts import Part, ThoughtScan
from runtime.text.token_pieces import TokenPieces

_Token = tuple[int, LogprobRows, int]


class AnswerLogprobs:
    """The logprob entries of one choice. A stream takes the new entries with each of its events.

    A token may be only partly in the content. Its entry then shows only that part.
    """

    def __init__(self, pieces: TokenPieces, decoder: TextDecoder, scan: ThoughtScan | None) -> None:
        """Start with no output.

        Args:
            pieces: returns the text of a single token.
            decoder: returns each token's part of the text.
            scan: finds the thoughts; `None` if thoughts stay in the content.
        """
        self._pieces = pieces
        self._decoder = decoder
        self._scan = scan
        # The unread tokens by chunk, and the number of tokens of the first chunk that are read. A
        # chunk is not split, because that of a whole answer has thousands of tokens.
        self._tokens: deque[tuple[list[int], LogprobRows]] = deque()
        self._num_read = 0
        self._num_values = 0
        # `_begin` is the position of the current run's text. A run consists of the tokens `_group`,
        # which together give the text `_run`.
        self._begin = 0
        self._group: list[_Token] = []
        self._run = ""
        self._text = _AnswerText()
        self._is_over = self._is_streamed = False

    def add(self, chunk: GenerationChunk, events: Sequence[OutputEvent]) -> None:
        """Add a chunk, and the events that the output parser made of it."""
        logprobs = outputs_of(chunk)
        self._num_values += len(logprobs) * (1 + logprobs.num_top)
        if len(logprobs) and chunk.token_ids:
            self._tokens.append((chunk.token_ids, logprobs))
        self._is_over = chunk.finish_reason is not None
        if self._scan is None:
            parts = [Part(chunk.text, "answer")]
        else:
            parts = self._scan.feed(chunk.text)
            if self._is_over:
                parts += self._scan.finish()
        for part in parts:
            self._text.read(part)
        self._text.keep(events)

    def take(self) -> dict[str, Any]:
        """Return `logprobs`, with the new entries of tokens that are now known to be content."""
        if self._is_over and not self._is_streamed:
            # A whole answer is long, so its entries are made while they are sent.
            content = _Entries(self._num_values, self._entries())
        else:
            self._is_streamed = True
            entries = [each for each in self._entries() if each is not None]
            cost = sum(1 + len(entry["top_logprobs"]) for entry in entries)
            content = _Entries(cost, iter(entries))
        return {"content": content, "refusal": None}

    def _entries(self) -> Iterator[dict[str, Any] | None]:
        """Yield the entries known so far, with `None` between them from time to time.

        `None` lets the caller pause while many tokens outside the content are skipped.
        """
        num_passed = 0
        limit = sys.maxsize if self._is_over else self._text.settled
        while self._read_run():
            end = self._begin + len(self._run)
            if end > limit:
                return
            kept = self._text.kept_between(self._begin, end)
            if kept:
                yield from self._spell(kept)
            elif (num_passed := num_passed + 1) % BATCH == 0:
                yield None
            self._begin, self._group, self._run = end, [], ""

    def _read_run(self) -> bool:
        """Read tokens until they give some text; return whether there is any."""
        while not self._run and (token := self._next_token()) is not None:
            self._run = self._decoder.push(token[0])
            # A hidden special token has no text. Any other token without text is part of a
            # character that the next token completes.
            if self._run or not self._pieces.is_special(token[0]):
                self._group.append(token)
        if not self._run and self._is_over:
            self._run = self._decoder.finish()
        return bool(self._run and self._group)

    def _next_token(self) -> _Token | None:
        if not self._tokens:
            return None
        token_ids, logprobs = self._tokens[0]
        at = self._num_read
        self._num_read += 1
        if self._num_read >= min(len(token_ids), len(logprobs)):
            self._tokens.popleft()
            self._num_read = 0
        return token_ids[at], logprobs, at

    def _spell(self, kept: str) -> Iterator[dict[str, Any]]:
        """Yield the entries of the current run's tokens; `kept` is its text in the content."""
        data = [self._pieces.data(token_id) for token_id, _, _ in self._group]
        if kept != self._run or b"".join(data) != kept.encode():
            data = _shared_out(kept, data)
        for (token_id, logprobs, at), spelled in zip(self._group, data, strict=True):
            if not spelled:
                continue
            entry = chat_token(token_id, logprobs.chosen[at], self._pieces)
            if entry["bytes"] != [*spelled]:
                entry |= {"token": spelled.decode(errors="replace"), "bytes": [*spelled]}
            top = zip(*logprobs.top_columns(at), strict=True)
            entry["top_logprobs"] = [chat_token(each, value, self._pieces) for value, each in top]
            yield entry


def _shared_out(text: str, data: Sequence[bytes]) -> list[bytes]:
    """Split `text`, which differs from the tokens' own joined texts, into one part per token."""
    shared = []
    for each in data[:-1]:
        own = each.decode(errors="replace")
        # Some tokenizers strip the spaces around a token in the text.
        taken = next((part for part in (own, own.strip()) if text.startswith(part)), "")
        shared.append(taken.encode())
        text = text[len(taken) :]
    return [*shared, text.encode()]


class _Entries(Pieces):
    """The list `logprobs.content` as JSON, encoded one entry (one token) at a time."""

    def __init__(self, cost: int, entries: Iterator[dict[str, Any] | None]) -> None:
        self.cost = cost
        self._entries = entries

    def pieces(self) -> Iterator[bytes]:
        comma = b"["
        for entry in self._entries:
            if entry is None:
                # A space is valid JSON between entries. Sending it lets other tasks run.
                yield b" "
                continue
            yield comma + orjson.dumps(entry)
            comma = b","
        yield b"[]" if comma == b"[" else b"]"


class _AnswerText:
    """Records which parts of an output's text are content of the answer.

    Attributes:
        settled: position up to which it is known what is content.
    """

    def __init__(self) -> None:
        """Start with no text."""
        self.settled = 0
        self._num_read = 0
        # Parts of the text after the thoughts that are not yet known to be content or a call: the
        # position and the text of each.
        self._open: deque[tuple[int, str]] = deque()
        self._is_behind_call = False
        self._kept: deque[tuple[int, str]] = deque()

    def read(self, part: Part) -> None:
        """Add the next part of the output's text."""
        if part.is_answer:
            self._open.append((self._num_read, part.text))
        self._num_read += len(part.text)
        if not self._open:
            self.settled = self._num_read

    def keep(self, events: Sequence[OutputEvent]) -> None:
        """Add the events that the output parser made of the text so far."""
        last = max(
            (at for at, each in enumerate(events) if isinstance(each, ContentText)), default=-1
        )
        for at, event in enumerate(events):
            if isinstance(event, ContentText):
                self._find(event.text, is_last=at == last)
            elif not isinstance(event, ReasoningText):
                self._is_behind_call = True

    def kept_between(self, begin: int, end: int) -> str:
        """Return the content between two positions. Later calls must have later positions."""
        found = []
        while self._kept and self._kept[0][0] < end:
            start, text = self._kept.popleft()
            found.append(text[max(begin - start, 0) : end - start])
            if start + len(text) > end:
                self._kept.appendleft((end, text[end - start :]))
                break
        return "".join(found)

    def _find(self, text: str, *, is_last: bool) -> None:
        """Find the content `text` in the output's text; tool calls before it are not content."""
        whole = "".join(part for _, part in self._open)
        if whole.startswith(text) and not self._is_behind_call:
            place = 0
        elif is_last:
            place = whole.rfind(text)
        else:
            place = whole.find(text)
        if place < 0:
            # The parser has put a tag in front of the content that the model did not write.
            text = text.removeprefix(OPEN_TAG)
            place = whole.find(text)
            if place < 0 or not text:
                return
        self._is_behind_call = False
        end, passed = place + len(text), 0
        while self._open and passed < end:
            start, part = self._open.popleft()
            begin, stop = max(place - passed, 0), min(end - passed, len(part))
            if begin < stop:
                self._kept.append((start + begin, part[begin:stop]))
            if stop < len(part):
                self._open.appendleft((start + stop, part[stop:]))
                self.settled = start + stop
                return
            passed += len(part)
            self.settled = start + len(part)
        if not self._open:
            self.settled = self._num_read
