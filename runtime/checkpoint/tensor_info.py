"""A tensor in a weight file: safetensors or GGUF. Front-safe: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        dtype: safetensors' name, such as `BF16`, or GGUF's, such as `Q4_K`.
        shape: the shape in numbers, however they are stored.
        start, end: byte range in the file.
        interleaved_heads: number of heads whose two halves the file interleaves row by row; 0 if
            rows are in order.
        offset: the offset that the file has added to every number.
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
        """Bytes on disk."""
        return self.end - self.start
