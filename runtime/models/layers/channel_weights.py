"""The weights of a short convolution whose channels are split among ranks."""

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
    """A tensor of several spans of rows, such as q, k and v; a rank has a part of each span.

    Attributes:
        spans: number of rows of each span. The fields `start` and `length` are not used.
        rank, num_ranks: this rank's index and the number of ranks, which select the part.
    """

    spans: tuple[int, ...] = ()
    rank: int = 0
    num_ranks: int = 1

    def local_part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the tensor `whole`; see `WeightShard`."""
        parts = whole.split(list(self.spans))
        return torch.cat([part.chunk(self.num_ranks)[self.rank] for part in parts])

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part; see `WeightShard`."""
        return (sum(self.spans) // self.num_ranks, *self.shape[1:])


class ChannelWeights(WeightHolder):
    """Tensors whose first dimension is split among ranks; their addresses never change."""

    __slots__ = ("_parameters",)

    def __init__(self, shards: dict[str, WeightShard], context: BuildContext) -> None:
        """Allocate a tensor for each shard: `[rows, all other dimensions]`, or `[rows]`."""
        self._parameters: dict[str, Parameter] = {}
        for name, shard in shards.items():
            rows, *others = shard.local_shape
            shape = (rows, math.prod(others)) if others else (rows,)
            self._parameters[name] = Parameter(shape, {"": shard}, context.dtype, context.device)
            self._parameters[name].allocate()

    def tensor(self, name: str) -> Tensor:
        """Return this rank's part of the tensor `name`."""
        return self._parameters[name].allocate()

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._parameters.items()

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Do nothing: each tensor is used in the memory that the loader filled."""

    def discard(self) -> None:
        """Do nothing: the loader fills each tensor in one go and leaves no partial state."""

    def plain(self, name: str) -> Tensor:
        return self._parameters[name].allocate()

    def release(self) -> None:
        """Do nothing: the tensors are too small to be worth releasing."""

    @property
    def size_bytes(self) -> int:
        return sum(each.allocate().nbytes for each in self._parameters.values())


def conv_holder(
    spans: Sequence[int], width: int, context: BuildContext, *, bias: bool = False
) -> ChannelWeights:
    """Return the weights of a convolution over channels.

    Args:
        spans: number of channels of each span; a rank has a part of each span.
        width: tokens that the convolution sees.
        context: dtype, device and rank.
        bias: whether the convolution has a bias.
    """
    channels, rank, num_ranks = sum(spans), context.tp_rank, context.tp_size

    def shard(*shape: int) -> WeightShard:
        place = (0, 0, 0, 0, 1, tuple(spans), rank, num_ranks)
        return SpansShard(shape, *place)

    shards = {"weight": shard(channels, 1, width)}
    if bias:
        shards["bias"] = shard(channels)
    return ChannelWeights(shards, context)
