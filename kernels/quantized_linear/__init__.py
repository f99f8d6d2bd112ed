"""Matrix products with weights that stay as they are stored: blocks of 2 to 8 bits, or 16 bits.

A weight is one or several stored matrices of the same width, one below the other, each in a form
of its own (`FORMS`, GGUF's types). So a fused query-key-value or gate-up product is one weight,
whatever forms its parts have:

    weight = pack([StoredMatrix("q4_k", q), StoredMatrix("q4_k", k), StoredMatrix("q6_k", v)], 896)
    y = weight(x)                   # x: float32 or bfloat16 [num_tokens, 896]
    rows = weight.rows(token_ids)   # an embedding; a tied head is the same object

`QuantizedLinear` is a `PackedLinear`: a linear layer takes either.

A product with blocks of 2 to 8 bits rounds each row of `x`. On CPUs with AMX it is rounded to
bfloat16. Elsewhere it is rounded to 8 bits in blocks of 32 values: the scale is the block's largest
magnitude / 127, values round to nearest, ties to even; products within a block are integers and so
exact. Blocks are added in float32 in order. Forms of 16 and 32 bits multiply in float32 and round
no row, with AMX too. A row therefore has the same bits in any batch and with any number of threads;
without AMX, with any instruction set. A row's block that holds an infinity or a NaN leaves no
finite result in the row.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.linear import PackedLinear
from kernels.quantized_linear.decode import decode
from kernels.quantized_linear.forms import FORMS, StoredForm, find_form
from kernels.table import Choice, Entry, Table

__all__ = [
    "FORMS",
    "QUANTIZED_LINEAR",
    "QuantizedLinear",
    "QuantizedLinearKernels",
    "StoredForm",
    "StoredMatrix",
    "dequantize",
    "find_form",
    "pack",
]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix as it is stored.

    Attributes:
        form: name in `FORMS`.
        data: `[out_features, row_bytes]` uint8, contiguous, on the CPU; `row_bytes` as
            `StoredForm.row_bytes` says. It may be mapped from a file: it is read once, in order.
    """

    form: str
    data: Tensor

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.data.shape[0]

    def check(self, in_features: int) -> None:
        """Check form, shape and dtype.

        Raises:
            ValueError: `data` is not a matrix of that form with `in_features` columns.
        """
        want = find_form(self.form).row_bytes(in_features)
        data = self.data
        if data.dtype is not torch.uint8 or data.dim() != 2 or data.shape[1] != want:
            raise ValueError(
                f"{self.form} data of {in_features} columns must be uint8 [rows, {want}], "
                f"not {data.dtype} {list(data.shape)}"
            )


class QuantizedLinear(PackedLinear):
    """Stacked stored matrices, in the layout of an implementation.

    Attributes:
        forms: `(form, out_features)` of each matrix, from the first row down.
        implementation: name in the `QUANTIZED_LINEAR` table.
    """

    def __init__(self, parts: Sequence[StoredMatrix], in_features: int) -> None:
        """Check the parts; raise the errors of `pack`."""
        if not parts:
            raise ValueError("a weight has at least one stored matrix")
        for part in parts:
            part.check(in_features)
        self.forms = tuple((part.form, part.out_features) for part in parts)
        super().__init__(in_features, sum(part.out_features for part in parts))

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`; the module's head says how it is rounded.

        Args:
            x: `[num_tokens, in_features]`, contiguous, float32 or bfloat16.

        Returns:
            A new `[num_tokens, out_features]` tensor, the dtype of `x`.
        """

    @abstractmethod
    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return rows of the weight, for an embedding.

        Args:
            ids: `[num_ids]` int64, each in `[0, out_features)`.
            dtype: type of the result, float32 or bfloat16; values are rounded to it once.

        Returns:
            A new `[num_ids, in_features]` tensor.

        Raises:
            IndexError: an id is out of range.
        """

    @abstractmethod
    def stored(self) -> list[StoredMatrix]:
        """Return the parts as they were stored; bit for bit what was packed."""

    @abstractmethod
    def repack_stored(self, parts: Sequence[StoredMatrix]) -> None:
        """Replace the weight in place.

        Raises:
            ValueError: forms or shapes differ from what was packed first.
        """

    def unpack(self) -> Tensor:
        """Return the weight as float32 `[out_features, in_features]`, decoded from its blocks."""
        return self.rows(torch.arange(self.out_features))

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:  # noqa: ARG002
        """Refuse floats: only stored blocks can replace stored blocks.

        Raises:
            ValueError: always; see `repack_stored`.
        """
        raise ValueError("a quantized weight is replaced by matrices of its stored forms")

    def check_same(self, parts: Sequence[StoredMatrix]) -> None:
        """Check that `parts` may replace the present matrices.

        Raises:
            ValueError: forms or shapes differ.
        """
        for part in parts:
            part.check(self.in_features)
        given = tuple((part.form, part.out_features) for part in parts)
        if given != self.forms:
            raise ValueError(f"stored matrices {given} do not fit {self.forms}")


class QuantizedLinearKernels(Protocol):
    """The functions of an implementation of this op."""

    def pack(
        self, parts: Sequence[StoredMatrix], in_features: int, bias: Tensor | None
    ) -> QuantizedLinear:
        """See `kernels.quantized_linear.pack`."""


QUANTIZED_LINEAR: Table[QuantizedLinearKernels] = Table(
    "quantized linear",
    {
        "reference": Entry("kernels.quantized_linear.reference"),
        "cpu": Entry(
            "kernels.quantized_linear.cpu", probe="kernels.cpu.library:unavailable", invariant=True
        ),
    },
    {"cpu": ("cpu",)},
)


def choose(device_type: str, wanted: str | None = None) -> Choice[QuantizedLinearKernels]:
    """Pick the implementation for a device type; see `kernels.table.Table.choose`."""
    return QUANTIZED_LINEAR.choose(device_type, wanted)


def pack(
    parts: Sequence[StoredMatrix],
    in_features: int,
    bias: Tensor | None = None,
    implementation: str | None = None,
) -> QuantizedLinear:
    """Pack stored matrices for products, without widening them in memory.

    Packed matrices replace the stored ones: drop `parts` afterwards, or both stay in memory. Both
    take about the same memory (`QuantizedLinear.size_bytes`).

    Args:
        parts: the matrices, one below the other.
        in_features: columns of each.
        bias: `[out_features]` of all parts together, or None; it is added in float32.
        implementation: a name in `QUANTIZED_LINEAR`, or None to pick one for the CPU.

    Raises:
        ValueError: a form or `implementation` is unknown, `in_features` is not a whole number of
            blocks, or a shape or dtype is wrong.
        RuntimeError: `implementation` cannot run here.
    """
    device = parts[0].data.device.type if parts else "cpu"
    return choose(device, implementation).kernels.pack(parts, in_features, bias)


def dequantize(stored: StoredMatrix, in_features: int) -> Tensor:
    """Return the numbers of a stored matrix, computed in plain torch.

    Returns:
        `[out_features, in_features]` float32.

    Raises:
        ValueError: the form is unknown, or the shape or dtype is wrong.
    """
    stored.check(in_features)
    return decode(stored.form, stored.data)
