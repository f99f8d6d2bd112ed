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
        num_parts: number of equal parts of each span. With fewer parts than ranks, neighboring
            ranks have copies of one part.
    """

    spans: tuple[int, ...] = ()
    rank: int = 0
    num_ranks: int = 1
    num_parts: tuple[int, ...] = ()

    def local_part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the tensor `whole`; see `WeightShard`."""
        cut = zip(whole.split(list(self.spans)), self.num_parts, strict=True)
        return torch.cat([span.chunk(n)[self.rank * n // self.num_ranks] for span, n in cut])

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part; see `WeightShard`."""
        cut = zip(self.spans, self.num_parts, strict=True)
        return (sum(rows // count for rows, count in cut), *self.shape[1:])


def spans_shard(
    spans: Sequence[int],
    rest: tuple[int, ...],
    context: BuildContext,
    *,
    offset: int = 0,
    num_parts: Sequence[int] = (),
) -> SpansShard:
    """Return this rank's part of a tensor of several spans of rows.

    Args:
        spans: number of rows of each span.
        rest: the other dimensions of the tensor.
        context: this rank and the number of ranks.
        offset: first row of the parameter that the part fills.
        num_parts: for each span, the maximum number of parts into which it can be divided. With
            more ranks than parts, several ranks have the same part. Empty for no limit.

    Raises:
        ValueError: a span cannot be divided evenly.
    """
    ranks = context.tp_size
    most = [min(count, ranks) for count in num_parts] or [ranks] * len(spans)
    for rows, count in zip(spans, most, strict=True):
        if rows % count or ranks % count:
            raise ValueError(f"{rows} rows in {count} parts cannot be cut among {ranks} ranks")
    place = (offset, 0, 0, 0, 1, tuple(spans), context.tp_rank, ranks, tuple(most))
    return SpansShard((sum(spans), *rest), *place)


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
    spans: Sequence[int],
    width: int,
    context: BuildContext,
    *,
    bias: bool = False,
    num_parts: Sequence[int] = (),
) -> ChannelWeights:
    """Return the weights of a convolution over channels.

    Args:
        spans: number of channels of each span; a rank has a part of each span.
        width: tokens that the convolution reads.
        context: dtype, device and rank.
        bias: whether the convolution has a bias.
        num_parts: for each span, the maximum number of parts into which it can be divided; empty
            for no limit.
    """
    shapes = {"weight": (1, width), "bias": ()} if bias else {"weight": (1, width)}
    return ChannelWeights(
        {
            name: spans_shard(spans, rest, context, num_parts=num_parts)
            for name, rest in shapes.items()
        },
        context,
    )
