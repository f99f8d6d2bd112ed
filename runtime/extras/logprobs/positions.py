"""Log-probabilities as they are asked for and read: unpacked only for who asked for them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from runtime.client.generation_stream import GenerationChunk
from runtime.requests.extra_spec import ExtraBlock, ExtraSpec

NAME = "logprobs"


class LogprobSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which log-probabilities a request wants besides those of its output tokens.

    Attributes:
        start_len: first prompt position to report; -1 for none of the prompt.
        top_num: most probable tokens to report at each position.
        token_ids: ids to report at each position.
        with_text: whether the native API's triples show tokens' text.
    """

    start_len: int = -1
    top_num: int = 0
    token_ids: list[int] = []
    with_text: bool = False

    def extra(self) -> ExtraSpec:
        """What a request carries."""
        return ExtraSpec(NAME, _ENCODER.encode(self), self.start_len)

    @classmethod
    def of(cls, params: bytes) -> LogprobSpec:
        """What `ExtraSpec.params` say."""
        return _SPEC_DECODER.decode(params)


class LogprobArrays(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The data of a block: numbers of each position, position after position.

    Attributes:
        chosen: float32 bytes, one for each position: of the token that stands there.
        top_values: float32 bytes, the largest ones of each position in descending order.
        top_ids: int32 bytes, their tokens.
        id_values: float32 bytes, of the ids that were asked for, in their order.
    """

    chosen: bytes
    top_values: bytes = b""
    top_ids: bytes = b""
    id_values: bytes = b""

    def encode(self) -> bytes:
        """As a block carries them."""
        return _ENCODER.encode(self)


_ENCODER = msgspec.msgpack.Encoder()
_SPEC_DECODER = msgspec.msgpack.Decoder(LogprobSpec)
_DECODER = msgspec.msgpack.Decoder(LogprobArrays)


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


def inputs_of(chunk: GenerationChunk) -> list[PositionLogprobs]:
    """Of the prompt's tokens after the first that is reported, those that a chunk brings."""
    return read_blocks(chunk.blocks(NAME, is_input=True)) if chunk.extras else []


def outputs_of(chunk: GenerationChunk) -> list[PositionLogprobs]:
    """One for each of a chunk's tokens; or for the one that would come next, where none is made."""
    if not chunk.extras:
        return []
    # A stop string cuts tokens off; what stands behind the last one is cut here.
    found = read_blocks(chunk.blocks(NAME, is_input=False))
    return found[: len(chunk.token_ids) or len(chunk.unsent_ids(NAME))]


def read_blocks(blocks: Iterable[ExtraBlock]) -> list[PositionLogprobs]:
    """Every position of `blocks`, in order."""
    return [each for block in blocks for each in _read(_DECODER.decode(block.data))]


def _read(block: LogprobArrays) -> list[PositionLogprobs]:
    chosen = _floats(block.chosen)
    if not chosen:
        return []
    top = list(zip(_floats(block.top_values), array("i", block.top_ids).tolist(), strict=True))
    id_values = _floats(block.id_values)
    num_top, num_ids = len(top) // len(chosen), len(id_values) // len(chosen)
    return [
        PositionLogprobs(
            value,
            top[at * num_top : (at + 1) * num_top],
            id_values[at * num_ids : (at + 1) * num_ids],
        )
        for at, value in enumerate(chosen)
    ]


def _floats(data: bytes) -> list[float]:
    return array("f", data).tolist()
