"""Parameters of experts in MXFP4: blocks of codes and their scales, as a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.group_linear import MXFP4_GROUP, encode
from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.layers.parameter import WeightShard
from runtime.models.layers.stacked_experts import StackedParameter

_BYTES = MXFP4_GROUP // 2


def to_codes(blocks: Tensor) -> Tensor:
    """Unpack bytes of two 4-bit codes, the first in the lower bits, to one code per byte."""
    return torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)


def to_blocks(codes: Tensor) -> Tensor:
    """Pack codes in pairs into bytes; the inverse of `to_codes`."""
    first, second = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return first | second << 4


class BytesParameter(StackedParameter):
    """The bytes of all experts' rows, `[num_experts * rows, bytes]` in our order of rows.

    Attributes:
        trailing: dimensions of a row in the checkpoint.
    """

    __slots__ = ("trailing",)

    def __init__(self, plain: StackedParameter, trailing: tuple[int, ...]) -> None:
        """Describe the bytes.

        Args:
            plain: the parameter of the same numbers in 16 bits.
            trailing: dimensions of a row in the checkpoint; the first one counts the groups.
        """
        whole, dims = plain.shards[""], [0, 2, 1] if plain.is_transposed else [0, 1, 2]
        count, rows, columns = (whole.shape[dim] for dim in dims)
        width = torch.Size(trailing).numel()
        dim = None if whole.shard_dim is None else dims.index(whole.shard_dim)
        start, length = whole.start, whole.length
        if dim == 2 and (start % MXFP4_GROUP or length % MXFP4_GROUP):
            # Groups cannot be cut, so this rank keeps whole rows.
            dim, start, length = None, 0, 0
        elif dim == 2:
            start, length = start * width // columns, length * width // columns
        super().__init__(
            WeightShard((count, rows, width), 0, dim, start, length, whole.num_blocks),
            torch.uint8,
            plain.device,
            is_transposed=False,
            is_interleaved=plain.is_interleaved,
        )
        self.trailing = trailing

    def problem(self, spec: WeightSpec, tensor: Tensor) -> str:
        if tuple(tensor.shape) not in (spec.shape, self._local_shape()):
            return f"{list(tensor.shape)}, expected {list(spec.shape)}"
        return "" if tensor.dtype is torch.uint8 else f"{tensor.dtype}, expected torch.uint8"

    def cut(self, shard_name: str, whole: Tensor) -> Tensor:
        return super().cut(shard_name, whole.flatten(2))

    def fill(self, shard_name: str, tensor: Tensor) -> None:
        super().fill(shard_name, tensor.flatten(2).to(self.device))

    def as_stored(self, ours: Tensor) -> Tensor:
        """Return this rank's part in the dimensions of the checkpoint.

        Args:
            ours: this rank's tensor in our order of rows.
        """
        return self.stored(ours).reshape(self._local_shape())

    def _local_shape(self) -> tuple[int, ...]:
        count, rows, width = self.shards[""].local_shape
        groups = self.trailing[0] * width // self.shards[""].shape[2]
        return count, rows, groups, *self.trailing[1:]


class BlocksParameter(BytesParameter):
    """A parameter of MXFP4 blocks, which may be filled with blocks or with floats.

    Attributes:
        plain: the parameter of the same numbers in 16 bits.
        scale: the parameter that receives the scales of floats that are encoded while they load.
    """

    __slots__ = ("plain", "scale")

    def __init__(self, plain: StackedParameter, scale: BytesParameter) -> None:
        super().__init__(plain, (scale.trailing[0], _BYTES))
        self.plain, self.scale = plain, scale

    @property
    def number_shards(self) -> Mapping[str, WeightShard]:
        """The shards of the numbers that the blocks represent: those of a plain parameter."""
        return self.plain.shards

    @property
    def has_whole_rows(self) -> bool:
        """Whether this rank keeps whole rows although it computes only a part of each row."""
        return self.plain.shape[1] != self.scale.shape[1] * MXFP4_GROUP

    def mine(self, numbers: Tensor) -> Tensor:
        """Return this rank's columns of `numbers`, whose rows are in our order."""
        shard = self.plain.shards[""]
        return numbers.narrow(1, shard.start, shard.length) if self.has_whole_rows else numbers

    def problem(self, spec: WeightSpec, tensor: Tensor) -> str:
        if tensor.dtype is torch.uint8:
            return super().problem(spec, tensor)
        whole = self.plain.shards[""].shape
        if tuple(tensor.shape) != whole:
            return f"{list(tensor.shape)}, expected {list(whole)}"
        if tensor.is_floating_point() and tensor.itemsize > 1:
            return ""
        return f"{tensor.dtype}, expected torch.uint8 or a floating type"

    def cut(self, shard_name: str, whole: Tensor) -> Tensor:
        # Floats are split among ranks only after they are encoded.
        return super().cut(shard_name, whole) if whole.dtype is torch.uint8 else whole

    def fill(self, shard_name: str, tensor: Tensor) -> None:
        if tensor.dtype is not torch.uint8:
            rows = tensor.transpose(1, 2) if self.plain.is_transposed else tensor
            count, height, _ = rows.shape
            matrix = rows.to(self.device).flatten(0, 1)
            made = encode(matrix, "mxfp4", MXFP4_GROUP, torch.uint8, zeros=False)
            self.scale.fill(shard_name, made.scales.view(count, height, -1))
            tensor = to_blocks(made.codes).view(count, height, -1, _BYTES)
        super().fill(shard_name, tensor)
