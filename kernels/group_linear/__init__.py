"""Matrix products whose weights are quantized; groups of a row's columns share a scale.

The quantized form of a number is called its code: an integer of 4 or 8 bits, or a 4-bit float
(E2M1). An integer stands for `(code - zero) * scale`, a 4-bit float for itself times a power of two
(MXFP4). Activations keep their 16 or 32 bits. Only the codes and scales are in memory: GPU kernels
convert them inside the product; CPU kernels store and multiply them in GGUF's blocks of 32 numbers.

    weight = Grouped("int4", codes, scales, zeros, group=128)
    product = pack(weight, bias, x.dtype)   # a PackedLinear, or None: no kernel for this form
    y = product(x)

If the columns of a group are scattered (GPTQ's act order), the columns of the weight and of `x` are
sorted by group.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels.linear import PackedLinear
from kernels.table import Entry, Table

__all__ = [
    "BITS",
    "MIDDLE",
    "MXFP4_GROUP",
    "Form",
    "Grouped",
    "GroupedLinear",
    "code_e2m1",
    "decode_e2m1",
    "encode",
    "pack",
]

Form = Literal["int4", "int8", "mxfp4"]
BITS: dict[Form, int] = {"int4": 4, "int8": 8, "mxfp4": 4}
# The code that represents 0 if zero points are not stored.
MIDDLE: dict[Form, int] = {"int4": 8, "int8": 128, "mxfp4": 0}
MXFP4_GROUP = 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_E2M1_EXPONENT = 2
_E8M0_BIAS = 127


@dataclass(frozen=True)
class Grouped:
    """A quantized matrix (codes and scales), or several such matrices stacked along the rows.

    Attributes:
        form: how a code becomes a number.
        codes: `[rows, columns]` uint8, one code per byte.
        scales: `[rows, num_groups]`, a floating dtype; for `mxfp4` uint8, exponents plus 127.
        zeros: `[rows, num_groups]` uint8, the zero point (the code that represents 0) of each
            group; `None` if it is `MIDDLE` in all groups.
        group: number of columns that share a scale; the last group may be shorter.
        order: `[columns]` int64: column `i` of `codes` is column `order[i]` of the matrix. `None`
            if the columns are in the order of the original matrix (no act order).
    """

    form: Form
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    order: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        """Columns of the matrix."""
        return self.codes.shape[1]

    def factors(self) -> Tensor:
        """Return the scales as float32 `[rows, num_groups]`."""
        if self.form == "mxfp4":
            return torch.exp2(self.scales.float() - _E8M0_BIAS)
        return self.scales.float()

    def numbers(self) -> Tensor:
        """Return the float32 matrix `[rows, columns]`, with its columns in their original order."""
        place = torch.arange(self.columns, device=self.codes.device) // self.group
        if self.form == "mxfp4":
            found = decode_e2m1(self.codes)
        else:
            found = self.codes.float()
            if self.zeros is None:
                found -= MIDDLE[self.form]
            else:
                found -= self.zeros.float()[:, place]
        found *= self.factors()[:, place]
        if self.order is None:
            return found
        return torch.empty_like(found).index_copy_(1, self.order, found)

    def with_groups_of(self, group: int) -> "Grouped":
        """Return the same matrix in groups of `group` columns, a divisor of `self.group`."""
        if group == self.group:
            return self
        times = self.group // group
        count = -(-self.columns // group)
        return replace(
            self,
            scales=self.scales.repeat_interleave(times, 1)[:, :count],
            zeros=None if self.zeros is None else self.zeros.repeat_interleave(times, 1)[:, :count],
            group=group,
        )


def decode_e2m1(codes: Tensor) -> Tensor:
    """Decode 4-bit floats (a sign bit, two bits of exponent, one of mantissa) to float32."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)
    return table[codes.long()]


def code_e2m1(numbers: Tensor) -> Tensor:
    """Return the uint8 codes of the nearest 4-bit floats.

    If two are equally near, the even code is returned.
    """
    table = torch.tensor(_E2M1, device=numbers.device)
    middle = (table[1:] + table[:-1]) / 2
    above = torch.bucketize(numbers.abs(), middle, right=False)
    at_middle = (numbers.abs() == middle[above.clamp_max(6)]) & (above % 2 == 1) & (above < 7)
    return (above + at_middle.long() + 8 * torch.signbit(numbers).long()).to(torch.uint8)


def encode(matrix: Tensor, form: Form, group: int, dtype: torch.dtype, *, zeros: bool) -> Grouped:
    """Quantize a matrix; the scale of a group follows from its largest and smallest number.

    Args:
        matrix: `[rows, columns]`, a floating dtype.
        form: form of the codes.
        group: number of columns that share a scale.
        dtype: dtype of the scales.
        zeros: whether each group has a zero point of its own.
    """
    rows, columns = matrix.shape
    padded = torch.nn.functional.pad(matrix.float(), (0, -columns % group))
    parts = padded.view(rows, -1, group)
    largest = parts.abs().amax(-1)
    if form == "mxfp4":
        # Source: OCP Microscaling Formats specification 1.0, section 6.3.
        power = torch.log2(largest.clamp_min(2.0**-100)).floor() - _LARGEST_E2M1_EXPONENT
        scales = (power + _E8M0_BIAS).clamp(0, 254).to(torch.uint8)
        codes = code_e2m1(parts / torch.exp2(scales.float() - _E8M0_BIAS)[..., None])
        return Grouped(
            form,
            codes.view(rows, -1)[:, :columns].contiguous(),
            scales,
            None,
            group,
        )
    most = 2 ** BITS[form] - 1
    if zeros:
        low, high = parts.amin(-1).clamp_max(0), parts.amax(-1).clamp_min(0)
        scales = ((high - low) / most).to(dtype)
    else:
        scales = (largest * 2 / most).to(dtype)
    # A group of zeros gets the scale 1; its codes equal the zero point with any scale.
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    found = (low / -scales.float()).round().clamp(0, most) if zeros else None
    zero = MIDDLE[form] if found is None else found[..., None]
    codes = (parts / scales.float()[..., None] + zero).round().clamp(0, most)
    return Grouped(
        form,
        codes.to(torch.uint8).view(rows, -1)[:, :columns].contiguous(),
        scales,
        None if found is None else found.to(torch.uint8),
        group,
    )


class GroupedLinear(PackedLinear):
    """A linear layer with a quantized weight (codes), in the layout of one implementation."""

    @abstractmethod
    def codes(self) -> Tensor:
        """Return the weight's codes, `[out_features, in_features]` uint8, one per byte.

        Their columns are in the order that the packed `Grouped` had.
        """

    @abstractmethod
    def replace(self, other: PackedLinear) -> bool:
        """Copy another layer's weight into our memory; return false if its layout differs.

        The memory stays the same because CUDA graphs hold its addresses.
        """

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:  # noqa: ARG002
        """Raise an error: only quantized weights can replace quantized weights.

        Raises:
            ValueError: always; quantized weights are replaced by `replace`.
        """
        raise ValueError("floats cannot replace a matrix in codes; use `replace`")


class GroupLinearKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def pack(
        self, weight: Grouped, bias: Tensor | None, dtype: torch.dtype
    ) -> GroupedLinear | None:
        """Return a quantized linear layer or `None`; see `kernels.group_linear.pack`."""


GROUP_LINEAR: Table[GroupLinearKernels] = Table(
    "group_linear",
    {
        "reference": Entry("kernels.group_linear.reference"),
        "cpu": Entry("kernels.group_linear.cpu"),
        "triton": Entry(
            "kernels.group_linear.triton", probe="kernels.triton_support.device:unavailable"
        ),
    },
    {"cpu": ("cpu",), "cuda": ("triton", "reference")},
)


def pack(weight: Grouped, bias: Tensor | None, dtype: torch.dtype) -> GroupedLinear | None:
    """Return a linear layer with a quantized weight; `None` if the device has no kernel for it.

    Args:
        weight: the quantized matrix. Drop it afterwards, or both layouts stay in memory.
        bias: `[rows]`, or `None`.
        dtype: dtype of the activations.
    """
    device_type = weight.codes.device.type
    made = GROUP_LINEAR.choose(device_type).kernels.pack(weight, bias, dtype)
    if made is None and device_type == "cpu":
        return GROUP_LINEAR.load("reference").pack(weight, bias, dtype)
    return made
