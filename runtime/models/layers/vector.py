"""Vectors of weights in float32, such as one number per head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import Parameter, WeightHolder, WeightShard


class Vector(WeightHolder):
    """One or several numbers for each head or expert; the tensor never changes its address.

    Attributes:
        vector: `[length]` float32, this rank's part of each checkpoint tensor, one after the other.
    """

    def __init__(
        self, shards: WeightShard | Mapping[str, WeightShard], context: BuildContext
    ) -> None:
        """Allocate the vector for one checkpoint tensor, or for several by their shard names."""
        if isinstance(shards, WeightShard):
            shards = {"": shards}
        shape = (sum(shard.num_rows for shard in shards.values()),)
        self._parameter = Parameter(shape, shards, torch.float32, context.device)
        self.vector = self._parameter.allocate()

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "vector", self._parameter

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Do nothing: the vector is used in the memory that the loader filled."""

    def discard(self) -> None:
        """Do nothing: the loader fills the vector in one go and leaves no partial state."""

    def plain(self, name: str) -> Tensor:  # noqa: ARG002  # there is one
        return self.vector

    def release(self) -> None:
        """Do nothing: the vector is small, and attention layers hold references to it."""

    @property
    def size_bytes(self) -> int:
        return self.vector.nbytes
