"""Describes a tensor in a weight file, safetensors or GGUF. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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
        offset: a number that was added to every number in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    interleaved_heads: int = 0
    offset: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Number of its bytes in the file."""
        return self.end - self.start
