"""The form in which checkpoints store matrices quantized to 4-bit or 8-bit integers (codes).

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from runtime.models.quantization.module_lists import SchemeGroup

# The order of codes in words of 32 bits. GPTQ packs along the matrix's columns; its first format
# stores zero points that are one less. AWQ packs along the rows, interleaved. compressed-tensors
# packs along the columns.
Layout = Literal["gptq", "gptq_v2", "awq", "packed"]
# Endings of the names on disk: codes, scales, zero points, and the group of each column.
_NAMES = {
    "awq": ("qweight", "scales", "qzeros", ""),
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "gptq_v2": ("qweight", "scales", "qzeros", "g_idx"),
    "packed": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
}
WORDS, LONG_WORDS = ("I32",), ("I64",)
SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class StoredTensor:
    """One of the tensors in which a matrix is stored.

    Attributes:
        name: ending of the tensor's name.
        shape, dtypes: the tensor's shape on disk, and the dtypes in which it may be stored.
        target: ending of the name of the parameter that the tensor fills.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    target: str = ""


@dataclass(frozen=True)
class GroupScheme:
    """The stored form of a group of matrices.

    Attributes:
        layout: the order of codes in words.
        bits: bits of a code, 4 or 8.
        group: number of columns that share a scale; 0 for all of them.
        has_zeros: whether zero points (the codes that represent 0) are stored.
        has_order: whether the group of each column is stored.
        is_symmetric: whether all zero points are the middle code. GPTQ stores them nevertheless.
    """

    layout: Layout
    bits: int
    group: int
    has_zeros: bool
    has_order: bool = False
    is_symmetric: bool = False

    @property
    def middle(self) -> int:
        """The code that represents 0 if zero points are not stored."""
        return 2 ** (self.bits - 1)

    @property
    def names(self) -> tuple[str, str, str, str]:
        """Endings of the names of codes, scales, zero points and the columns' groups."""
        return _NAMES[self.layout]

    def group_of(self, columns: int) -> int:
        """Return the number of columns that share a scale in a matrix with `columns` columns."""
        return self.group or columns

    def problem(self, shape: tuple[int, ...]) -> str:
        """Return why a matrix of this shape cannot be stored in this form; empty if it can."""
        rows, columns = shape
        words = 32 // self.bits
        if columns % self.group_of(columns) and self.layout != "packed":
            return f"{columns} columns in groups of {self.group}"
        if self.layout == "awq" and rows % words:
            return f"{rows} rows in words of {words} codes"
        if self.layout.startswith("gptq") and (columns % words or rows % words):
            return f"{rows}x{columns} numbers in words of {words} codes"
        return ""

    def tensors(self, shape: tuple[int, ...]) -> Iterator[StoredTensor]:
        """Yield the tensors in which a matrix of this shape is stored, the codes first."""
        rows, columns = shape
        of_word = 32 // self.bits
        groups = -(-columns // self.group_of(columns))
        code, scale, zero, order = self.names
        if self.layout == "packed":
            yield StoredTensor(code, (rows, -(-columns // of_word)), WORDS)
            yield StoredTensor(scale, (rows, groups), SCALES, "_scale")
            zeros = (-(-rows // of_word), groups)
        else:
            wide = (
                (columns, rows // of_word) if self.layout == "awq" else (columns // of_word, rows)
            )
            yield StoredTensor(code, wide, WORDS)
            yield StoredTensor(scale, (groups, rows), SCALES, "_scale")
            zeros = (groups, rows // of_word)
        if self.has_zeros:
            yield StoredTensor(zero, zeros, WORDS, "_zero")
        if self.has_order:
            yield StoredTensor(order, (columns,), WORDS, "_order")
        if self.layout == "packed":
            yield StoredTensor("weight_shape", (2,), (*LONG_WORDS, *WORDS), "_shape")

    @property
    def description(self) -> str:
        """Text for logs: `int4, groups of 128, with zeros`."""
        group = f"groups of {self.group}" if self.group else "channels"
        zeros = ", with zeros" if self.has_zeros and not self.is_symmetric else ""
        return f"int{self.bits}, {group}{zeros}"


CodesGroup = SchemeGroup[GroupScheme]
