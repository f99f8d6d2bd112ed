"""The form in which checkpoints store matrices in 8 bits, and the rounding of activations.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.models.quantization.module_lists import SchemeGroup


@dataclass(frozen=True)
class Fp8Scheme:
    """The stored form of a group of matrices.

    Attributes:
        block: rows and columns of a block of numbers that share a scale; 0 for all rows or columns.
        rounds: whether products round their activations to codes of the same type.
        group: for activations, number of a token's columns that share a scale; 0 for all of them.
        is_static: whether the checkpoint gives the scale of activations, one for all tokens.
        scale: last part of the names of the matrices' scales.
        codes: type of the codes on disk, `F8_E4M3` or `I8`.
        input_scale: last part of the names of the activations' scales, if they are static.
    """

    block: tuple[int, int]
    rounds: bool = True
    group: int = 0
    is_static: bool = False
    scale: str = "weight_scale"
    codes: str = "F8_E4M3"
    input_scale: str = "input_scale"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a matrix's scales; checkpoints may omit its dimensions of 1."""
        if self.block == (0, 0):
            return (1,)
        rows, columns = (
            -(-size // (block or size)) for size, block in zip(shape, self.block, strict=True)
        )
        return rows, columns

    @property
    def description(self) -> str:
        """Text for logs: `channel scales, activations rounded by token`."""
        weights = {(0, 0): "tensor", (1, 0): "channel"}.get(self.block)
        weights = weights or "x".join(map(str, self.block))
        if not self.rounds:
            return f"{weights} scales, activations not rounded"
        by = "a static scale" if self.is_static else f"{self.group}" if self.group else "token"
        return f"{weights} scales, activations rounded by {by}"


Fp8Group = SchemeGroup[Fp8Scheme]
