"""GGUF's blocks on the device: kept where kernels support them, otherwise converted to floats."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kernels.experts import PackedExperts
from kernels.experts.reference import LoopedExperts
from kernels.linear import PackedLinear
from kernels.quantized_linear import (
    QuantizedLinear,
    StoredMatrix,
    dequantize,
    find_form,
    look_up,
    pack,
)
from kernels.quantized_linear.encode import encode
from runtime.checkpoint.model_spec import Quantization, WeightSpec
from runtime.models.layers.experts import ExpertsStore
from runtime.models.layers.matrix import Matrix
from runtime.models.layers.parameter import Parameter, Stored, WeightShard
from runtime.models.quantization.gguf.front import StoredForms
from runtime.models.quantization.method import DeviceMethod

logger = logging.getLogger(__name__)

# The dtypes of activations that the kernels for blocks take.
_ACTIVATIONS = (torch.float32, torch.bfloat16)


class Device(DeviceMethod):
    """Keeps blocks on a CPU for float32 or bfloat16 activations.

    Otherwise converts them to floats.
    """

    def __init__(self, quantization: Quantization) -> None:
        assert isinstance(quantization, StoredForms)
        self._form = quantization.form
        self._widened: Counter[str] = Counter()
        self._why = ""

    def parameter(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Parameter:
        forms = self._forms(weights)
        if not any(map(_is_blocks, forms.values())):
            return plain
        self._widened.update(forms.values())
        return WidenedParameter(plain, forms)

    def matrix(self, plain: Parameter, weights: Mapping[str, WeightSpec]) -> Matrix | None:
        forms = self._forms(weights)
        if not self._keeps(plain, forms):
            return None
        return BlockMatrix(BlockParameter(plain, forms))

    def experts(
        self, plain: Mapping[str, Parameter], weights: Stored, mine: range
    ) -> ExpertsStore | None:
        forms = {name: self._forms(weights[name]) for name in plain}
        if not all(self._keeps(plain[name], forms[name]) for name in plain):
            return None
        blocks = {name: BlockParameter(plain[name], forms[name]) for name in plain}
        return BlockExperts(blocks["gate_up"], blocks["down"], mine)

    def _forms(self, weights: Mapping[str, WeightSpec]) -> dict[str, str]:
        return {shard: self._form(weight).lower() for shard, weight in weights.items()}

    def _keeps(self, plain: Parameter, forms: Mapping[str, str]) -> bool:
        """Whether a matrix is kept in its stored blocks."""
        if len(plain.shape) != 2 or set(forms) != set(plain.shards):
            return False
        if all(form == "f32" for form in forms.values()):
            return False
        if plain.device.type != "cpu" or plain.dtype not in _ACTIVATIONS:
            self._why = f"{plain.dtype} on {plain.device.type}".removeprefix("torch.")
            return False
        if plain.dtype is torch.bfloat16 and not any(map(_is_blocks, forms.values())):
            # `kernels.linear` multiplies matrices in 16 bits by bfloat16 activations.
            return False
        if all(_part_of(shard, forms[name]) is not None for name, shard in plain.shards.items()):
            return True
        self._why = "a rank's part would not end where blocks end"
        return False

    def report(self) -> None:
        if self._widened:
            what = ", ".join(f"{count} of {form}" for form, count in self._widened.most_common())
            logger.info("Widened to plain numbers while they load: %s (%s)", what, self._why)


def _is_blocks(form: str) -> bool:
    return find_form(form).block_values > 1


def _part_of(shard: WeightShard, form: str) -> tuple[int, int] | None:
    """Return the first byte of this rank's part of a row, and the number of its bytes.

    Returns `None` if the part would begin or end within a block.
    """
    found = find_form(form)
    columns = shard.shape[1]
    start, length = (shard.start, shard.length) if shard.shard_dim == 1 else (0, columns)
    if start % found.block_values or length % found.block_values or columns % found.block_values:
        return None
    return found.row_bytes(start), found.row_bytes(length)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a matrix as rows of bytes; blocks are returned as they are."""
    return tensor if tensor.dtype is torch.uint8 else tensor.contiguous().view(torch.uint8)


class _StoredParameter(Parameter):
    """A parameter that may be filled with GGUF's blocks or with floats.

    Attributes:
        forms: the form of each shard, a name in `kernels.quantized_linear.FORMS`.
    """

    __slots__ = ("forms",)

    def __init__(self, plain: Parameter, forms: Mapping[str, str]) -> None:
        super().__init__(plain.shape, plain.shards, plain.dtype, plain.device)
        self.forms = dict(forms)

    def problem(self, spec: WeightSpec, tensor: Tensor) -> str:
        if tensor.dtype is not torch.uint8:
            return super().problem(spec, tensor)
        form, columns = find_form(self.forms[spec.shard]), spec.shape[1]
        rows = (spec.shape[0], self.shards[spec.shard].num_rows)
        widths = {form.row_bytes(columns)}
        part = _part_of(self.shards[spec.shard], form.name)
        if part is not None:
            widths.add(part[1])
        if tensor.dim() == 2 and tensor.shape[0] in rows and tensor.shape[1] in widths:
            return ""
        return f"{list(tensor.shape)} bytes, expected {[rows[0], form.row_bytes(columns)]}"

    def cut(self, shard_name: str, whole: Tensor) -> Tensor:
        shard = self.shards[shard_name]
        if whole.dtype is not torch.uint8:
            return super().cut(shard_name, whole)
        if shard.shard_dim != 1:
            return shard.local_part(whole)
        part = _part_of(shard, self.forms[shard_name])
        # If this rank's part would cut blocks, the whole tensor is converted to floats first.
        return whole if part is None else whole.narrow(1, *part)

    def _mine(self, shard_name: str, tensor: Tensor) -> Tensor:
        """Return this rank's part of blocks, given the whole tensor or this part."""
        shard = self.shards[shard_name]
        width = find_form(self.forms[shard_name]).row_bytes(shard.shape[1])
        is_whole = tuple(tensor.shape) == (shard.shape[0], width)
        return self.cut(shard_name, tensor) if is_whole else tensor


class WidenedParameter(_StoredParameter):
    """A parameter of plain numbers that may be filled with GGUF's blocks."""

    __slots__ = ()

    def fill(self, shard_name: str, tensor: Tensor) -> None:
        if tensor.dtype is not torch.uint8:
            super().fill(shard_name, tensor)
            return
        shard, form = self.shards[shard_name], self.forms[shard_name]
        blocks = self._mine(shard_name, tensor)
        columns = blocks.shape[1] // find_form(form).block_bytes * find_form(form).block_values
        numbers = dequantize(StoredMatrix(form, blocks.contiguous()), columns)
        if shard.shard_dim == 1 and columns != shard.length:
            numbers = numbers.narrow(1, shard.start, shard.length)
        self.rows(shard_name).copy_(numbers)


class BlockParameter(_StoredParameter):
    """A parameter that keeps the blocks of each shard.

    Shards may have different forms, so each has memory of its own.

    Attributes:
        blocks: by shard, `[rows, bytes]` uint8, blocks that are filled but not yet packed. They may
            be views of a mapped file, which packing reads once.
    """

    __slots__ = ("blocks",)

    def __init__(self, plain: Parameter, forms: Mapping[str, str]) -> None:
        super().__init__(plain, forms)
        self.blocks: dict[str, Tensor] = {}

    @property
    def columns(self) -> int:
        """Numbers in a row on this rank."""
        return self.shape[1]

    def ordered(self) -> list[str]:
        """Return the names of the shards on this rank in the order of their rows."""
        here = [name for name, shard in self.shards.items() if shard.num_rows]
        return sorted(here, key=lambda name: self.shards[name].offset)

    def fill(self, shard_name: str, tensor: Tensor) -> None:
        shard, form = self.shards[shard_name], self.forms[shard_name]
        if not shard.num_rows:
            return
        if tensor.dtype is torch.uint8:
            self.blocks[shard_name] = self._mine(shard_name, tensor).contiguous()
            return
        is_part = tuple(tensor.shape) == shard.local_shape
        numbers = tensor if is_part else shard.local_part(tensor)
        numbers = numbers.reshape(shard.local_shape).to("cpu")
        self.blocks[shard_name] = encode(numbers, form).data

    def restore(self, saved: Tensor) -> None:
        start = 0
        for name in self.ordered():
            rows, width = self.shards[name].num_rows, self.width(name)
            self.blocks[name] = saved[start : start + rows * width].view(rows, width).clone()
            start += rows * width

    def width(self, shard_name: str) -> int:
        """Return the bytes of a row of the shard `shard_name`."""
        return find_form(self.forms[shard_name]).row_bytes(self.columns)

    def take(self, shard_names: list[str]) -> list[StoredMatrix]:
        """Remove the blocks of these shards and return them for packing."""
        return [StoredMatrix(self.forms[name], self.blocks.pop(name)) for name in shard_names]


class BlockMatrix(Matrix):
    """Stored blocks of one or several projections that are computed as one product.

    If only single rows are read (`hold`), the blocks stay as they are stored. Blocks of a mapped
    file then take memory only for the rows that are read.
    """

    packed: QuantizedLinear | None

    def __init__(self, weight: BlockParameter) -> None:
        self.weight = weight
        self.packed = None
        self._held: StoredMatrix | None = None

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self.weight

    def pack(self, kept: list[tuple[str, str]], bias: Tensor | None) -> PackedLinear:
        order = self.weight.ordered()
        for _, shard_name in [each for each in kept if each[0] == "weight"]:
            self.weight.blocks[shard_name] = self.part("weight", shard_name)
        # If only the bias was filled, there are no new blocks.
        parts = self.weight.take(order)
        self.packed = pack(parts, self.weight.columns, bias)
        return self.packed

    def hold(self, kept: list[tuple[str, str]]) -> None:
        order = self.weight.ordered()
        if len(order) > 1:
            self.pack(kept, None)
        elif not kept:
            (self._held,) = self.weight.take(order)

    def discard(self) -> None:
        self.weight.blocks.clear()

    def _stored(self) -> dict[str, StoredMatrix]:
        if self._held is not None:
            return {self.weight.ordered()[0]: self._held}
        assert self.packed is not None, "the weight is not loaded"
        return dict(zip(self.weight.ordered(), self.packed.stored(), strict=True))

    def plain(self, name: str) -> Tensor:  # noqa: ARG002  # there is one
        return torch.cat([part.data.flatten() for part in self._stored().values()])

    def part(self, name: str, shard_name: str) -> Tensor:  # noqa: ARG002
        return self._stored()[shard_name].data

    def values(self, name: str, shard_name: str) -> Tensor:  # noqa: ARG002
        return dequantize(self._stored()[shard_name], self.weight.columns)

    def rows(self, ids: Tensor) -> Tensor:
        if self._held is not None:
            return look_up(self._held, self.weight.columns, ids).to(self.weight.dtype)
        assert self.packed is not None, "the weight is not loaded"
        return self.packed.rows(ids, self.weight.dtype)

    def head(self, rows: slice) -> PackedLinear:
        assert self.packed is not None, "the weight is not loaded"
        if rows == slice(0, self.packed.out_features):
            return self.packed
        (whole,) = self._stored().values()
        mine = StoredMatrix(whole.form, whole.data[rows].contiguous())
        return pack([mine], self.weight.columns)

    def release(self) -> None:
        self.discard()
        self.packed = self._held = None

    @property
    def size_bytes(self) -> int:
        return super().size_bytes if self._held is None else self._held.data.nbytes


class BlockExperts(ExpertsStore):
    """Stored blocks of a layer's experts; each expert is multiplied separately."""

    def __init__(self, gate_up: BlockParameter, down: BlockParameter, mine: range) -> None:
        self._parameters = {"gate_up": gate_up, "down": down}
        self._mine = mine
        self._packed: dict[str, list[QuantizedLinear]] = {}

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._parameters.items()

    def pack(self, kept: list[tuple[str, str]]) -> PackedExperts:
        for name, shard_name in kept:
            if self._parameters[name].shards[shard_name].num_rows:
                self._parameters[name].blocks[shard_name] = self.part(name, shard_name)
        for name, parameter in self._parameters.items():
            self._packed[name] = [
                pack(parameter.take(self._shards(name, expert)), parameter.columns)
                for expert in self._mine
            ]
        return LoopedExperts(self._packed["gate_up"], self._packed["down"])

    @staticmethod
    def _shards(name: str, expert: int) -> list[str]:
        return [f"{expert}.gate", f"{expert}.up"] if name == "gate_up" else [str(expert)]

    def _stored(self, name: str, shard_name: str) -> StoredMatrix:
        expert = int(shard_name.partition(".")[0])
        packed = self._packed[name][expert - self._mine.start]
        return packed.stored()[self._shards(name, expert).index(shard_name)]

    def plain(self, name: str) -> Tensor:
        order = self._parameters[name].ordered()
        return torch.cat([self._stored(name, shard_name).data.flatten() for shard_name in order])

    def part(self, name: str, shard_name: str) -> Tensor:
        if not self._parameters[name].shards[shard_name].num_rows:
            return torch.empty(0, 0, dtype=torch.uint8)
        return self._stored(name, shard_name).data

    def values(self, name: str, shard_name: str) -> Tensor:
        parameter = self._parameters[name]
        if not parameter.shards[shard_name].num_rows:
            return torch.empty(parameter.shards[shard_name].local_shape)
        return dequantize(self._stored(name, shard_name), parameter.columns)

    def discard(self) -> None:
        for parameter in self._parameters.values():
            parameter.blocks.clear()

    def release(self) -> None:
        self.discard()
        self._packed.clear()
