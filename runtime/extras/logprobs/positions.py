"""Log-probabilities on their way from the device to the answer, packed as bytes.

Only a position that is read becomes a Python object.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import msgspec

from runtime.client.generation_stream import GenerationChunk
from runtime.requests.extra_spec import ExtraBlock, ExtraSpec

NAME = "logprobs"


class LogprobSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log-probabilities that a request wants, besides those of its output tokens.

    Attributes:
        start_len: first prompt position to report; -1 for no prompt positions.
        top_num: number of most probable tokens to report at each position.
        token_ids: token ids to report at each position.
        with_text: whether the native API's triples include the tokens' text.
    """

    start_len: int = -1
    top_num: int = 0
    token_ids: list[int] = []
    with_text: bool = False

    def extra(self) -> ExtraSpec:
        """Return the `ExtraSpec` that carries this spec in a request."""
        return ExtraSpec(NAME, _ENCODER.encode(self), self.start_len)

    @classmethod
    def of(cls, params: bytes) -> LogprobSpec:
        """Return the spec that is encoded in `ExtraSpec.params`."""
        return _SPEC_DECODER.decode(params)


class LogprobArrays(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log-probabilities of consecutive positions, position after position.

    Attributes:
        chosen: float32 bytes, the log-probability of the actual token at each position.
        top_values: float32 bytes, the largest log-probabilities at each position, descending.
        top_ids: int32 bytes, the tokens of `top_values`.
        id_values: float32 bytes, the log-probabilities of the requested ids, in their order.
    """

    chosen: bytes
    top_values: bytes = b""
    top_ids: bytes = b""
    id_values: bytes = b""

    def encode(self) -> bytes:
        """Return the encoded values, the `data` of an `ExtraBlock`."""
        return _ENCODER.encode(self)


_ENCODER = msgspec.msgpack.Encoder()
_SPEC_DECODER = msgspec.msgpack.Decoder(LogprobSpec)
_DECODER = msgspec.msgpack.Decoder(LogprobArrays)


@dataclass(slots=True)
class PositionLogprobs:
    """The log-probabilities at one position.

    Attributes:
        logprob: log-probability of the actual token.
        top: the most probable tokens as (log-probability, id), in descending order.
        id_values: log-probabilities of the requested ids, in their order.
    """

    logprob: float
    top: list[tuple[float, int]]
    id_values: list[float]


class LogprobRows(Sequence[PositionLogprobs]):
    """The log-probabilities of a request's positions, in order.

    The numbers are packed: a number takes four bytes here, and about eighty in a list of tuples. A
    position becomes a Python object when it is read.

    Attributes:
        chosen: log-probability of the actual token at each position.
        num_top: number of most probable tokens at each position.
        num_ids: number of requested ids at each position.
    """

    __slots__ = ("_id_values", "_top_ids", "_top_values", "chosen", "num_ids", "num_top")

    def __init__(
        self,
        chosen: array[float],
        top_values: array[float],
        top_ids: array[int],
        id_values: array[float],
    ) -> None:
        """Keep arrays of float32 values and int32 ids, in the order of the positions."""
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
        """Return log-probabilities and ids of the most probable tokens at a position."""
        rows = slice(at * self.num_top, (at + 1) * self.num_top)
        return self._top_values[rows], self._top_ids[rows]

    def id_values(self, at: int) -> list[float]:
        """Return the log-probabilities of the requested ids at a position."""
        return self._id_values[at * self.num_ids : (at + 1) * self.num_ids].tolist()


# One object for all chunks without log-probabilities; it is never changed.
_NO_ROWS = LogprobRows(array("f"), array("f"), array("i"), array("f"))


def inputs_of(chunk: GenerationChunk) -> LogprobRows:
    """Return the log-probabilities of prompt tokens in a chunk.

    The first prompt token that is reported has none.
    """
    return read_blocks(chunk.blocks(NAME, is_input=True)) if chunk.extras else _NO_ROWS


def outputs_of(chunk: GenerationChunk) -> LogprobRows:
    """Return the log-probabilities at each token of a chunk; without tokens, at the next token."""
    if not chunk.extras:
        return _NO_ROWS
    # A stop string may have removed tokens from the chunk; their entries are removed too.
    found = read_blocks(chunk.blocks(NAME, is_input=False))
    return found[: len(chunk.token_ids) or len(chunk.unsent_ids(NAME))]


def read_blocks(blocks: Iterable[ExtraBlock]) -> LogprobRows:
    """Return the log-probabilities of all positions of `blocks`, in order."""
    chosen, top_values, top_ids, id_values = array("f"), array("f"), array("i"), array("f")
    for block in blocks:
        arrays = _DECODER.decode(block.data)
        chosen.frombytes(arrays.chosen)
        top_values.frombytes(arrays.top_values)
        top_ids.frombytes(arrays.top_ids)
        id_values.frombytes(arrays.id_values)
    return LogprobRows(chosen, top_values, top_ids, id_values)
