"""Small weights of channels or heads, which ranks split, such as those of a short convolution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import Parameter, WeightHolder, WeightShard


class ChannelWeights(WeightHolder):
    """Tensors whose first dimension is cut among ranks; they keep their addresses for life."""

    __slots__ = ("_parameters",)

    def __init__(
        self,
        shards: Mapping[str, WeightShard],
        dtypes: Mapping[str, torch.dtype],
        device: torch.device,
    ) -> None:
        """Keep a tensor for each of `shards`, as `[rows, everything else]` or `[rows]`."""
        self._parameters: dict[str, Parameter] = {}
        for name, shard in shards.items():
            rows, *others = shard.local_shape
            width = 1
            for size in others:
                width *= size
            shape = (rows, width) if others else (rows,)
            self._parameters[name] = Parameter(shape, {"": shard}, dtypes[name], device)
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
        """Do nothing: they are small."""

    @property
    def size_bytes(self) -> int:
        return sum(each.allocate().nbytes for each in self._parameters.values())


def conv_holder(
    channels: int, width: int, context: BuildContext, *, bias: bool = False
) -> ChannelWeights:
    """Return the weights of a convolution over `channels`, of which each rank has its part."""
    length = channels // context.tp_size
    place = (0, 0, context.tp_rank * length, length)
    shards = {"weight": WeightShard((channels, 1, width), *place)}
    if bias:
        shards["bias"] = WeightShard((channels,), *place)
    return ChannelWeights(shards, dict.fromkeys(shards, context.dtype), context.device)
