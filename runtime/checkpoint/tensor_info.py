"""Describes a tensor in a weight file, safetensors or GGUF. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class RowOrder(NamedTuple):
    """How the rows of a file's tensor are reordered and cut to get a tensor of the checkpoint.

    The file's rows from `first` on are read as an array `[left, right, rows of a head]`. Its first
    two dimensions are exchanged. Then the rows from `begin` to `end` are taken.

    Attributes:
        left, right: sizes of the two dimensions that are exchanged.
        first: number of rows at the beginning that stay in place.
        begin, end: range of the rows that are taken; `end` is None for all rows.
    """

    left: int
    right: int
    first: int = 0
    begin: int = 0
    end: int | None = None


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        name: its name.
        dtype: its type, named as in safetensors, such as `BF16`, or as in GGUF, such as `Q4_K`.
        shape: its shape in numbers, however they are stored.
        file: the file that has its bytes.
        start, end: range of its bytes in the file.
        interleaved_heads: number of heads whose two halves the file interleaves row by row; 0 if
            the rows are in order.
        rows: how the file's rows become the tensor's; None if they are the same.
        offset: a number that was added to every number in the file.
        is_decay: whether the file has `-exp(x)` in place of each number x.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    interleaved_heads: int = 0
    rows: RowOrder | None = None
    offset: float = 0.0
    is_decay: bool = False

    @property
    def size_bytes(self) -> int:
        """Number of bytes that the tensor has in the file."""
        return self.end - self.start
