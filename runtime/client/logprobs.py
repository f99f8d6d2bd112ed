"""Log-probabilities as the endpoints read them: packed until each position is looked at."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from runtime.client.admission import EngineLimits
from runtime.errors import InvalidRequest
from runtime.messages import LogprobBlock, LogprobSpec


@dataclass(slots=True)
class PositionLogprobs:
    """What was asked about one token.

    Attributes:
        logprob: of the token itself.
        top: the most probable tokens, (log-probability, id), in descending order.
        id_values: of the ids that were asked for, in their order.
    """

    logprob: float
    top: list[tuple[float, int]]
    id_values: list[float]


class LogprobRows(Sequence[PositionLogprobs]):
    """Positions of one request in order; each becomes Python objects when it is read.

    Packed, a number takes four bytes, as an object of a list of tuples some eighty.

    Attributes:
        chosen: one number for each position.
        num_top, num_ids: numbers of the most probable tokens and of the ids that were asked for,
            the same at each position.
    """

    __slots__ = ("_id_values", "_top_ids", "_top_values", "chosen", "num_ids", "num_top")

    def __init__(
        self,
        chosen: array[float],
        top_values: array[float],
        top_ids: array[int],
        id_values: array[float],
    ) -> None:
        """Hold what is given: float32 values and int32 ids, row after row."""
        self.chosen = chosen
        self._top_values = top_values
        self._top_ids = top_ids
        self._id_values = id_values
        self.num_top = len(top_ids) // len(chosen) if chosen else 0
        self.num_ids = len(id_values) // len(chosen) if chosen else 0

    def __len__(self) -> int:
        return len(self.chosen)

    @overload
    def __getitem__(self, at: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, at: slice) -> LogprobRows: ...
    def __getitem__(self, at: int | slice) -> PositionLogprobs | LogprobRows:
        if isinstance(at, slice):
            begin, end, step = at.indices(len(self))
            assert step == 1
            if (begin, end) == (0, len(self)):
                return self
            tops = slice(begin * self.num_top, end * self.num_top)
            ids = slice(begin * self.num_ids, end * self.num_ids)
            return LogprobRows(
                self.chosen[begin:end],
                self._top_values[tops],
                self._top_ids[tops],
                self._id_values[ids],
            )
        top = list(zip(*self.top_columns(at), strict=True))
        return PositionLogprobs(self.chosen[at], top, self.id_values(at))

    def __iter__(self) -> Iterator[PositionLogprobs]:
        return (self[at] for at in range(len(self)))

    def top_columns(self, at: int) -> tuple[array[float], array[int]]:
        """The most probable tokens of a position: log-probabilities and ids."""
        rows = slice(at * self.num_top, (at + 1) * self.num_top)
        return self._top_values[rows], self._top_ids[rows]

    def id_values(self, at: int) -> list[float]:
        """The values of the ids that were asked for, at a position."""
        return self._id_values[at * self.num_ids : (at + 1) * self.num_ids].tolist()


# Shared: nothing is ever added to it.
NO_ROWS = LogprobRows(array("f"), array("f"), array("i"), array("f"))


def read_blocks(blocks: Iterable[LogprobBlock], is_input: bool) -> LogprobRows:
    """Every position of the input, or of the output, in order."""
    chosen, top_values, top_ids, id_values = array("f"), array("f"), array("i"), array("f")
    for block in blocks:
        if block.is_input == is_input:
            chosen.frombytes(block.chosen)
            top_values.frombytes(block.top_values)
            top_ids.frombytes(block.top_ids)
            id_values.frombytes(block.id_values)
    return LogprobRows(chosen, top_values, top_ids, id_values)


def unsent_ids(blocks: Iterable[LogprobBlock]) -> list[int]:
    """Tokens that are reported although they are no part of the output."""
    return [each for block in blocks for each in array("i", block.unsent_ids)]


def check_logprobs(spec: LogprobSpec, num_prompt: int, limits: EngineLimits) -> None:
    """Check what needs the prompt's length.

    Raises:
        InvalidRequest: a start behind the prompt, or an id outside the vocabulary.
    """
    if spec.start_len > num_prompt:
        raise InvalidRequest(
            f"logprob_start_len ({spec.start_len}) is larger than the prompt "
            f"({num_prompt} tokens).",
            param="logprob_start_len",
        )
    for token_id in spec.token_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise InvalidRequest(
                f"token_ids_logprob must be in [0, {limits.vocab_size}), got {token_id}.",
                param="token_ids_logprob",
            )
