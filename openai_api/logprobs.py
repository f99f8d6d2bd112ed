"""Reads and writes log-probabilities in OpenAI's two formats: chat entries, completions' lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any

from runtime.client.generation_stream import GenerationChunk
from runtime.errors import InvalidRequest
from runtime.eventloop.json_pieces import BATCH, JsonList
from runtime.extras.logprobs.front import MAX_TOP_LOGPROBS
from runtime.extras.logprobs.positions import LogprobRows, LogprobSpec, inputs_of, outputs_of
from runtime.text.token_pieces import TokenPieces

MAX_CHAT_TOP = 20


def chat_spec(wanted: bool | None, top: int | None) -> LogprobSpec | None:
    """Read `logprobs` and `top_logprobs` of a chat request; return None if neither is requested.

    Raises:
        InvalidRequest: `top_logprobs` is out of range, or comes without `logprobs`.
    """
    if top is not None and not 0 <= top <= MAX_CHAT_TOP:
        raise InvalidRequest(
            f"top_logprobs must be in [0, {MAX_CHAT_TOP}], got {top}.", param="top_logprobs"
        )
    if top and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    return LogprobSpec(top_num=top or 0) if wanted else None


def completion_spec(wanted: int | bool | None, echo: bool) -> LogprobSpec | None:
    """Read `logprobs` of a completion request; return None if it is not requested.

    With `echo`, log-probabilities of the prompt's tokens are included.

    Raises:
        InvalidRequest: `logprobs` is not a number, or is out of range.
    """
    if wanted is None or wanted is False:
        return None
    if wanted is True or not 0 <= wanted <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            f"logprobs must be an integer in [0, {MAX_TOP_LOGPROBS}], got {wanted}.",
            param="logprobs",
        )
    return LogprobSpec(start_len=0 if echo else -1, top_num=wanted)


def chat_token(token_id: int, value: float, pieces: TokenPieces) -> dict[str, Any]:
    """Return a token with its log-probability in the format of chat."""
    data = pieces.data(token_id)
    return {"token": data.decode(errors="replace"), "bytes": [*data], "logprob": value}


_Rows = list[tuple[list[int], LogprobRows]]


def _each(rows: _Rows, make: Callable[[int, LogprobRows, int], Any]) -> Iterator[Any]:
    """Call `make` for each token, with its id, its `LogprobRows` and its index in them."""
    for token_ids, logprobs in rows:
        for at in range(len(logprobs)):
            yield make(token_ids[at], logprobs, at)


@dataclass
class CompletionLogprobs:
    """The lists in one choice's `logprobs`. A stream takes the new entries with each event.

    Attributes:
        pieces: returns the text of a single token.
        spec: what the request asks for.
        prompt: the prompt's token ids.
        num_values: number of log-probabilities added so far.
    """

    pieces: TokenPieces
    spec: LogprobSpec
    prompt: list[int]
    num_values: int = 0
    _first: list[int] = field(default_factory=list)
    _rows: _Rows = field(default_factory=list)
    _num_prompt_done: int = 0

    def add(self, chunk: GenerationChunk) -> None:
        """Add a chunk's log-probabilities: those of the echoed prompt, then those of its tokens."""
        # A request that generates no token still has a report on the next token, which is dropped.
        inputs, outputs = inputs_of(chunk), outputs_of(chunk)[: len(chunk.token_ids)]
        self.num_values += (len(inputs) + len(outputs)) * (1 + self.spec.top_num)
        if self.spec.start_len >= 0 and not self._num_prompt_done:
            # The prompt's first token has no log-probability, because no token precedes it.
            self._first = self.prompt[:1]
            self._num_prompt_done = 1
        begin = self._num_prompt_done
        self._num_prompt_done += len(inputs)
        self._rows += (
            (self.prompt[begin : self._num_prompt_done], inputs),
            (chunk.token_ids, outputs),
        )

    def take(self) -> dict[str, Any]:
        """Return the lists with the entries since the last call."""
        first, self._first = self._first, []
        rows, self._rows = self._rows, []
        text, num_top = self.pieces.spelled, self.spec.top_num
        num = len(first) + sum(len(logprobs) for _, logprobs in rows)

        def best(_id: int, logprobs: LogprobRows, at: int) -> dict[str, float]:
            found: dict[str, float] = {}
            for value, each in zip(*logprobs.top_columns(at), strict=True):
                key = text(each)
                # Several tokens may have the same text. It is the key of the most probable one; the
                # others have their id as the key.
                found[key if key not in found else f"token_id:{each}"] = value
            return found

        tokens = _each(rows, lambda token_id, _rows, _at: text(token_id))
        values = _each(rows, lambda _id, logprobs, at: logprobs.chosen[at])
        unknown = [None for _ in first]
        return {
            "text_offset": JsonList(num, repeat(-1, num), batch=BATCH),
            "token_logprobs": JsonList(num, chain(unknown, values), batch=BATCH),
            "tokens": JsonList(num, chain(map(text, first), tokens), batch=BATCH),
            "top_logprobs": JsonList(num * num_top, chain(unknown, _each(rows, best)), batch=64)
            if num_top
            else None,
        }
