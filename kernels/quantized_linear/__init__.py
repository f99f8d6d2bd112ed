"""Matrix products with weights in their stored form: blocks of 2 to 8 bits, or 16-bit floats.

A weight is one or several stored matrices of the same width, stacked along the rows, each in a form
of its own (`FORMS`, GGUF's types). A fused query-key-value or gate-up product is therefore one
weight, whatever forms its parts have:

    weight = pack([StoredMatrix("q4_k", q), StoredMatrix("q4_k", k), StoredMatrix("q6_k", v)], 896)
    y = weight(x)                   # x: float32 or bfloat16 [num_tokens, 896]
    rows = weight.rows(token_ids)   # an embedding; a tied head is the same object

`QuantizedLinear` is a `PackedLinear`, so a linear layer may use it.

A product with blocks of 2 to 8 bits rounds each row of `x`. On CPUs with AMX the row is rounded to
bfloat16. On other CPUs it is rounded to 8 bits in blocks of 32 values: the scale is the block's
largest magnitude / 127, and values round to nearest, ties to even. Products within a block are then
integers and so exact, and blocks are added in float32 in order. Forms of 16 and 32 bits multiply in
float32 and do not round, also with AMX.

A row therefore has the same bits in any batch and with any number of threads; without AMX, also
with any instruction set. If a block of a row holds an infinity or a NaN, no result of the row is
finite.
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
    "look_up",
    "pack",
]


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix in its stored form.

    Attributes:
        form: name of the form in `FORMS`, such as `q4_k`.
        data: `[out_features, row_bytes]` uint8, contiguous, on the CPU; see `StoredForm.row_bytes`.
            It may be mapped from a file, because it is read once, in order.
    """

    form: str
    data: Tensor

    @property
    def out_features(self) -> int:
        """Rows of the matrix."""
        return self.data.shape[0]

    def check(self, in_features: int) -> None:
        """Check form, shape and dtype of `data`.

        Raises:
            ValueError: `data` is not a matrix of this form with `in_features` columns.
        """
        want = find_form(self.form).row_bytes(in_features)
        data = self.data
        if data.dtype is not torch.uint8 or data.dim() != 2 or data.shape[1] != want:
            raise ValueError(
                f"{self.form} data of {in_features} columns must be uint8 [rows, {want}], "
                f"not {data.dtype} {list(data.shape)}"
            )


class QuantizedLinear(PackedLinear):
    """Stored matrices stacked along the rows, in the layout of an implementation.

    Attributes:
        forms: `(form, out_features)` of each matrix, in the order of their rows.
        implementation: name in the `QUANTIZED_LINEAR` table.
    """

    def __init__(self, parts: Sequence[StoredMatrix], in_features: int) -> None:
        """Check the parts.

        Raises:
            ValueError: there are no parts, or one of them does not have `in_features` columns.
        """
        if not parts:
            raise ValueError("a weight has at least one stored matrix")
        for part in parts:
            part.check(in_features)
        self.forms = tuple((part.form, part.out_features) for part in parts)
        super().__init__(in_features, sum(part.out_features for part in parts))

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`; the module's docstring says how it is rounded.

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
            dtype: dtype of the result, float32 or bfloat16; values are rounded once.

        Returns:
            A new `[num_ids, in_features]` tensor.

        Raises:
            IndexError: an id is out of range.
        """

    @abstractmethod
    def stored(self) -> list[StoredMatrix]:
        """Return the parts in their stored form, bit for bit as they were packed."""

    @abstractmethod
    def repack_stored(self, parts: Sequence[StoredMatrix]) -> None:
        """Replace the weight in place.

        Raises:
            ValueError: forms or shapes differ from what was packed first.
        """

    def unpack(self) -> Tensor:
        """Return the decoded weight, float32 `[out_features, in_features]`."""
        return self.rows(torch.arange(self.out_features))

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:  # noqa: ARG002
        """Raise an error: only stored matrices can replace stored matrices.

        Raises:
            ValueError: always; stored matrices are replaced by `repack_stored`.
        """
        raise ValueError("floats cannot replace stored forms; use `repack_stored`")

    def check_same(self, parts: Sequence[StoredMatrix]) -> None:
        """Check that `parts` may replace the present matrices.

        Raises:
            ValueError: forms or shapes differ from those of the present matrices.
        """
        for part in parts:
            part.check(self.in_features)
        given = tuple((part.form, part.out_features) for part in parts)
        if given != self.forms:
            raise ValueError(f"stored matrices {given} do not fit {self.forms}")


class QuantizedLinearKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def pack(
        self, parts: Sequence[StoredMatrix], in_features: int, bias: Tensor | None
    ) -> QuantizedLinear:
        """Return a linear layer of stored matrices; see `kernels.quantized_linear.pack`."""

    def look_up(self, stored: StoredMatrix, in_features: int, ids: Tensor) -> Tensor:
        """Return rows of a stored matrix; see `kernels.quantized_linear.look_up`."""


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
    """Return the implementation for a device type; see `kernels.table.Table.choose`."""
    return QUANTIZED_LINEAR.choose(device_type, wanted)


def pack(
    parts: Sequence[StoredMatrix],
    in_features: int,
    bias: Tensor | None = None,
    implementation: str | None = None,
) -> QuantizedLinear:
    """Pack stored matrices for products, without converting them to floats in memory.

    Packed matrices replace the stored ones: drop `parts` afterwards, or both stay in memory. Both
    take about the same memory (`QuantizedLinear.size_bytes`).

    Args:
        parts: the matrices, in the order of their rows.
        in_features: columns of each matrix.
        bias: `[out_features]` of all parts together, or `None`; it is added in float32.
        implementation: a name in `QUANTIZED_LINEAR`; `None` for the fastest on the CPU.

    Raises:
        ValueError: a form or `implementation` is unknown, `in_features` is not a whole number of
            blocks, or a shape or dtype is wrong.
        RuntimeError: `implementation` cannot run here.
    """
    device = parts[0].data.device.type if parts else "cpu"
    return choose(device, implementation).kernels.pack(parts, in_features, bias)


def look_up(
    stored: StoredMatrix, in_features: int, ids: Tensor, implementation: str | None = None
) -> Tensor:
    """Return rows of a matrix that is not packed, such as embeddings not shared with the head.

    Only the rows that are read take memory, if the matrix is mapped from a file.

    Args:
        stored: the matrix.
        in_features: its columns.
        ids: `[num_ids]` int64, each in `[0, out_features)`.
        implementation: a name in `QUANTIZED_LINEAR`; `None` for the fastest on the CPU.

    Returns:
        The numbers, as `QuantizedLinear.rows` returns them: float32 `[num_ids, in_features]`.

    Raises:
        IndexError: an id is out of range.
    """
    return choose("cpu", implementation).kernels.look_up(stored, in_features, ids)


def dequantize(stored: StoredMatrix, in_features: int) -> Tensor:
    """Return the numbers of a stored matrix, computed in plain torch.

    Returns:
        `[out_features, in_features]` float32.

    Raises:
        ValueError: the form is unknown, or the shape or dtype is wrong.
    """
    stored.check(in_features)
    return decode(stored.form, stored.data)
