"""Tensors that a checkpoint fills, and the part of each tensor that a rank holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from runtime.checkpoint.model_spec import WeightSpec
    from runtime.models.quantization.method import DeviceMethod

# The checkpoint tensors of a layer, by parameter and shard.
Stored = Mapping[str, Mapping[str, "WeightSpec"]]


@dataclass(frozen=True)
class WeightShard:
    """The part of a parameter that one checkpoint tensor fills.

    Attributes:
        shape: shape of the whole checkpoint tensor.
        offset: first row of the parameter that this tensor fills.
        shard_dim: dimension that ranks split; `None` if every rank has the whole tensor.
        start, length: this rank's part along `shard_dim`.
        num_blocks: number of projections of equal size that the checkpoint stacks into one tensor
            along `shard_dim`. The rank's part is then taken from each projection.
    """

    shape: tuple[int, ...]
    offset: int = 0
    shard_dim: int | None = None
    start: int = 0
    length: int = 0
    num_blocks: int = 1

    def local_part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the checkpoint tensor `whole`, as a view if possible."""
        if self.shard_dim is None:
            return whole
        if self.num_blocks == 1:
            return whole.narrow(self.shard_dim, self.start, self.length)
        dim = self.shard_dim
        blocks = whole.unflatten(dim, (self.num_blocks, -1))
        return blocks.narrow(dim + 1, self.start, self.length).flatten(dim, dim + 1)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(
            self.length * self.num_blocks if dim == self.shard_dim else size
            for dim, size in enumerate(self.shape)
        )

    @property
    def spans(self) -> tuple[int, ...]:
        """For a shard of several row spans, of each of which a rank has a part, the spans' rows.

        Empty for other shards.
        """
        return ()

    @property
    def num_parts(self) -> tuple[int, ...]:
        """For a shard of several row spans, the number of equal parts of each span.

        With fewer parts than ranks, neighboring ranks have copies of one part. Empty for other
        shards.
        """
        return ()

    @property
    def num_rows(self) -> int:
        """Rows of the parameter that this shard fills."""
        return self.local_shape[0]


class Parameter:
    """A tensor of this rank, filled shard by shard.

    Attributes:
        shape: shape of this rank's tensor.
        shards: the shards by name. A parameter that one checkpoint tensor fills has the shard `""`.
        tensor: the memory; `None` until it is needed, and again when its `WeightHolder` has packed
            it.
    """

    __slots__ = ("device", "dtype", "shape", "shards", "tensor")

    def __init__(
        self,
        shape: tuple[int, ...],
        shards: Mapping[str, WeightShard],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.shards = dict(shards)
        self.dtype = dtype
        self.device = device
        self.tensor: Tensor | None = None

    @property
    def number_shards(self) -> Mapping[str, WeightShard]:
        """The shards of the numbers that `WeightHolder.values` returns.

        They differ from `shards` for a quantized parameter.
        """
        return self.shards

    def allocate(self) -> Tensor:
        """Return the tensor, which is allocated without initial values when it is first needed."""
        if self.tensor is None:
            self.tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return self.tensor

    def rows(self, shard_name: str) -> Tensor:
        """Return a view of the rows that the shard `shard_name` fills."""
        shard = self.shards[shard_name]
        return self.allocate().narrow(0, shard.offset, shard.num_rows)

    def cut(self, shard_name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a checkpoint tensor, or more if `fill` needs more of it."""
        return self.shards[shard_name].local_part(whole)

    def problem(self, spec: WeightSpec, tensor: Tensor) -> str:
        """Return why a tensor does not fit `spec`, such as `[3], expected [4]`; empty if it fits.

        Args:
            spec: the checkpoint tensor as the weight map describes it.
            tensor: the whole tensor, or this rank's part of it.
        """
        if tuple(tensor.shape) not in (spec.shape, self.shards[spec.shard].local_shape):
            return f"{list(tensor.shape)}, expected {list(spec.shape)}"
        # torch counts 8-bit codes as floats, but they have no meaning without their scales.
        if tensor.is_floating_point() and tensor.itemsize > 1:
            return ""
        return f"{tensor.dtype}, expected a floating type"

    def restore(self, saved: Tensor) -> None:
        """Fill all shards from `saved`, which `WeightHolder.plain` returned earlier."""
        self.allocate().copy_(saved)

    def fill(self, shard_name: str, tensor: Tensor) -> None:
        """Copy a checkpoint tensor, or this rank's part of it, to its shard, cast to our dtype."""
        shard = self.shards[shard_name]
        is_part = tuple(tensor.shape) == shard.local_shape
        rows = self.rows(shard_name)
        # A checkpoint may store a linear layer as a convolution, with more dimensions.
        rows.copy_((tensor if is_part else shard.local_part(tensor)).reshape(rows.shape))


class WeightHolder(ABC):
    """A layer or a part of it that owns parameters."""

    def store(self, method: DeviceMethod, weights: Stored) -> None:  # noqa: B027  # most have no matrix
        """Let the quantization method store the matrices; called before any parameter is filled.

        Args:
            method: the model's quantization method.
            weights: the layer's weights by parameter and shard, as the family lists them.
        """

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters with their names: `weight`, and `bias` if there is one."""

    @abstractmethod
    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Put the filled tensors into use.

        Args:
            kept: (parameter, shard) pairs that were not filled and keep their present value. It is
                empty except in an update of a live model.
        """

    @abstractmethod
    def discard(self) -> None:
        """Drop tensors that were filled after the last `finalize`.

        Called if a load fails half-way.
        """

    @abstractmethod
    def plain(self, name: str) -> Tensor:
        """Return this rank's current value of a finalized parameter, without packing.

        The tensor may share memory with the weights in use: do not write to it.
        """

    def part(self, name: str, shard_name: str) -> Tensor:
        """Return the part of a parameter that one checkpoint tensor filled; see `plain`."""
        shard = dict(self.parameters())[name].shards[shard_name]
        part = self.plain(name).narrow(0, shard.offset, shard.num_rows)
        return part.reshape(shard.local_shape)

    def values(self, name: str, shard_name: str) -> Tensor:
        """Return the numbers that the stored shard represents, in a floating dtype.

        The result has the shape `shard.local_shape`.
        """
        return self.part(name, shard_name)

    @abstractmethod
    def release(self) -> None:
        """Release the memory of large matrices.

        They must be filled and finalized before their next use.
        """

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the layer's weights in memory."""


def whole(shape: tuple[int, ...]) -> dict[str, WeightShard]:
    """Return the shards of a parameter that one tensor fills and every rank holds in full."""
    return {"": WeightShard(shape)}
