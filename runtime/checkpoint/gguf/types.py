"""The tensor types of GGUF: how many numbers a block has, and how many bytes. No torch.

Source: `ggml_type` and the block structs of ggml (`ggml.h`, `ggml-common.h`).
"""

from __future__ import annotations

from typing import NamedTuple


class BlockType(NamedTuple):
    """One tensor type.

    Attributes:
        name: ggml's name of the type, such as `Q4_K`.
        block: number of consecutive numbers of a row that are stored together.
        block_bytes: bytes of such a block.
    """

    name: str
    block: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Return the number of bytes of a row of `columns` numbers, a whole number of blocks."""
        return columns // self.block * self.block_bytes


# The types that are read, by ggml's number. Files with others (`UNREAD`) are refused.
TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18),
    23: BlockType("IQ4_XS", 256, 136),
    28: BlockType("F64", 1, 8),
    30: BlockType("BF16", 1, 2),
    39: BlockType("MXFP4", 32, 17),
}
UNREAD = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S",
    22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0",
    40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
# The quantized types among them, by name.
BLOCK_TYPES: dict[str, BlockType] = {
    each.name: each for each in TYPES.values() if each.name not in FLOAT_TYPES
}
