"""Parameters of matrices quantized to 4-bit or 8-bit integers (codes): the codes and scales.

If a checkpoint gives floats instead of codes, they are quantized here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels.group_linear import Form, encode
from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.layers.parameter import Parameter, WeightShard
from runtime.models.quantization.groups.group_scheme import GroupScheme
from runtime.models.quantization.groups.layouts import pack_zeros, scales_by_row, unpack_codes

FORMS: dict[int, Form] = {4: "int4", 8: "int8"}


class SmallParameter(Parameter):
    """Scales, zero points or column orders in their stored form.

    Each rank has the whole tensors, because they are small.

    Attributes:
        dtypes: the dtype of the tensor that last filled each shard.
        filled: by shard, the tensors that were filled after the last packing.
    """

    __slots__ = ("dtypes", "filled")

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: torch.device
    ) -> None:
        shards: dict[str, WeightShard] = {}
        rows = 0
        for name, shape in shapes.items():
            shards[name] = WeightShard(shape, rows)
            rows += shape[0]
        super().__init__((rows,), shards, dtype, device)
        self.dtypes = dict.fromkeys(shapes, dtype)
        self.filled: dict[str, Tensor] = {}

    def cut(self, shard_name: str, whole: Tensor) -> Tensor:  # noqa: ARG002  # no rank has a part
        return whole

    def problem(self, spec: WeightSpec, tensor: Tensor) -> str:
        if not spec.has_shape(tuple(tensor.shape)):
            return f"{list(tensor.shape)}, expected {list(spec.shape)}"
        if tensor.is_floating_point() != self.dtype.is_floating_point:
            return f"{tensor.dtype}, expected a type like {self.dtype}"
        return ""

    def fill(self, shard_name: str, tensor: Tensor) -> None:
        self.dtypes[shard_name] = tensor.dtype
        shape = self.shards[shard_name].shape
        # Copied, because the tensor may be a view of a file or of a trainer's memory.
        self.filled[shard_name] = tensor.reshape(shape).to(self.device, copy=True)

    def restore(self, saved: Tensor) -> None:
        first = 0
        for name, shard in self.shards.items():
            dtype = self.dtypes[name]
            count = torch.Size(shard.shape).numel() * dtype.itemsize
            self.fill(name, saved[first : first + count].clone().view(dtype).view(shard.shape))
            first += count


class CodeParameter(Parameter):
    """The quantized integers (codes) of each shard, one per byte; or floats if it has no codes.

    Attributes:
        schemes: the scheme of each shard; `None` for a shard of floats.
        filled: by shard, this rank's parts of the tensors that were loaded since the last time the
            weights were packed for the kernels.
        small: the parameters that belong to the codes, by the endings of their names.
    """

    __slots__ = ("filled", "schemes", "small")

    def __init__(
        self,
        plain: Parameter,
        schemes: Mapping[str, GroupScheme | None],
        small: Mapping[str, SmallParameter],
    ) -> None:
        super().__init__(plain.shape, plain.shards, plain.dtype, plain.device)
        self.schemes = dict(schemes)
        self.small = dict(small)
        self.filled: dict[str, Tensor] = {}

    def ordered(self) -> list[str]:
        """Return the names of this rank's shards in the order of their rows."""
        here = [name for name, shard in self.shards.items() if shard.num_rows]
        return sorted(here, key=lambda name: self.shards[name].offset)

    def problem(self, spec: WeightSpec, tensor: Tensor) -> str:
        if self.schemes[spec.shard] is None:
            return super().problem(spec, tensor)
        # Words of codes are not split among ranks, and floats only after they are encoded.
        if tuple(tensor.shape) != spec.shape:
            return f"{list(tensor.shape)}, expected {list(spec.shape)}"
        if tensor.dtype is torch.int32 and "I32" in spec.dtypes:
            return ""
        if "I32" in spec.dtypes:
            return f"{tensor.dtype}, expected codes in torch.int32"
        return super().problem(spec, tensor)

    def cut(self, shard_name: str, whole: Tensor) -> Tensor:
        return super().cut(shard_name, whole) if self.schemes[shard_name] is None else whole

    def fill(self, shard_name: str, tensor: Tensor) -> None:
        shard, scheme = self.shards[shard_name], self.schemes[shard_name]
        if not shard.num_rows:
            return
        if scheme is None:
            is_part = tuple(tensor.shape) == shard.local_shape
            part = (tensor if is_part else shard.local_part(tensor)).to(self.dtype)
        elif tensor.dtype is torch.int32:
            codes = unpack_codes(tensor.to(self.device), scheme, shard.shape)
            part = shard.local_part(codes)
        else:
            part = shard.local_part(self._encode(shard_name, scheme, tensor.to(self.device)))
        self.filled[shard_name] = torch.empty_like(
            part, device=self.device, memory_format=torch.contiguous_format
        ).copy_(part)

    def _encode(self, shard_name: str, scheme: GroupScheme, numbers: Tensor) -> Tensor:
        rows, columns = self.shards[shard_name].shape
        scales = self.small["_scale"]
        group = scheme.group_of(columns)
        made = encode(
            numbers,
            FORMS[scheme.bits],
            group,
            scales.dtypes[shard_name],
            # Symmetric GPTQ stores zero points too, all of them the middle code.
            zeros=scheme.has_zeros and not scheme.is_symmetric,
        )
        scales.fill(shard_name, scales_by_row(made.scales, scheme))
        device = made.scales.device
        if scheme.has_zeros:
            zeros = made.zeros
            if zeros is None:
                zeros = torch.full_like(made.scales, scheme.middle, dtype=torch.uint8)
            self.small["_zero"].fill(shard_name, pack_zeros(zeros, scheme))
        if scheme.has_order:
            places = torch.arange(columns, dtype=torch.int32, device=device) // group
            self.small["_order"].fill(shard_name, places.to(torch.int32))
        if "_shape" in self.small and shard_name in self.small["_shape"].shards:
            self.small["_shape"].fill(shard_name, torch.tensor([rows, columns]))
        return made.codes

    def restore(self, saved: Tensor) -> None:
        """Take the bytes of all shards, which are concatenated in `saved`."""
        first = 0
        for name in self.ordered():
            shard, scheme = self.shards[name], self.schemes[name]
            dtype = self.dtype if scheme is None else torch.uint8
            count = torch.Size(shard.local_shape).numel() * dtype.itemsize
            part = saved[first : first + count].clone().view(dtype)
            if scheme is not None:
                # The bytes may be noise (see `live_weights`), of which only the bits of a code are
                # kept.
                part &= 2**scheme.bits - 1
            self.filled[name] = part.view(shard.local_shape).to(self.device)
            first += count
