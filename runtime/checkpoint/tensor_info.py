"""A tensor in a file of weights: safetensors or GGUF. Front-safe: no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Attributes:
        dtype: safetensors' name, such as `BF16`, or GGUF's, such as `Q4_K`.
        shape: in numbers, whatever they are stored in.
        start, end: byte range in the file.
        interleaved_heads: heads whose rows the file has in pairs, the first of either half ahead of
            the second; 0 where rows are in order.
        offset: what the file has added to every number.
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
