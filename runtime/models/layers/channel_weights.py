"""The weights of a short convolution over channels that ranks split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import Parameter, WeightHolder, WeightShard


@dataclass(frozen=True)
class SpansShard(WeightShard):
    """A tensor of several spans of rows; a rank takes its part of each span.

    Attributes:
        spans: rows of each span; they may differ, and `start` and `length` are not used.
        rank, num_ranks: this rank's index and the number of ranks, which select the part.
    """

    spans: tuple[int, ...] = ()
    rank: int = 0
    num_ranks: int = 1

    def local_part(self, whole: Tensor) -> Tensor:
        """See `WeightShard`."""
        parts = whole.split(list(self.spans))
        return torch.cat([part.chunk(self.num_ranks)[self.rank] for part in parts])

    @property
    def local_shape(self) -> tuple[int, ...]:
        """See `WeightShard`."""
        return (sum(self.spans) // self.num_ranks, *self.shape[1:])


class ChannelWeights(WeightHolder):
    """Tensors whose first dimension is cut among ranks; they keep their addresses for life."""

    __slots__ = ("_parameters",)

    def __init__(self, shards: dict[str, WeightShard], context: BuildContext) -> None:
        """Keep a tensor for each of `shards`, as `[rows, everything else]` or `[rows]`."""
        self._parameters: dict[str, Parameter] = {}
        for name, shard in shards.items():
            rows, *others = shard.local_shape
            shape = (rows, math.prod(others)) if others else (rows,)
            self._parameters[name] = Parameter(shape, {"": shard}, context.dtype, context.device)
            self._parameters[name].allocate()

    def tensor(self, name: str) -> Tensor:
        """Return this rank's tensor."""
        return self._parameters[name].allocate()

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._parameters.items()

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Do nothing: each tensor is used where it was filled."""

    def discard(self) -> None:
        """Do nothing: each tensor is filled at once."""

    def plain(self, name: str) -> Tensor:
        return self._parameters[name].allocate()

    def release(self) -> None:
        """Do nothing: the tensors are small."""

    @property
    def size_bytes(self) -> int:
        return sum(each.allocate().nbytes for each in self._parameters.values())


def conv_holder(
    spans: Sequence[int], width: int, context: BuildContext, *, bias: bool = False
) -> ChannelWeights:
    """Return the weights of a convolution; a rank has a part of each span of its channels."""
    channels, rank, num_ranks = sum(spans), context.tp_rank, context.tp_size

    def shard(*shape: int) -> WeightShard:
        place = (0, 0, 0, 0, 1, tuple(spans), rank, num_ranks)
        return SpansShard(shape, *place)

    shards = {"weight": shard(channels, 1, width)}
    if bias:
        shards["bias"] = shard(channels)
    return ChannelWeights(shards, context)
