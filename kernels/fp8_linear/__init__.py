"""Matrix products in 8 bits: weights and activations are quantized to codes, which have scales.

Codes are 8-bit floats (E4M3) or integers (int8); a code times its scale is the number.

A scale of the weight belongs to a block of the matrix: the whole matrix, a row, or 128x128 numbers.
A scale of activations belongs to a token or to a group of a token's columns, or it is given by the
checkpoint. It is never computed from a whole batch, so a token's numbers do not depend on other
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import PackedLinear
from kernels.linear import pack as pack_plain
from kernels.rounding import (
    CODES,
    Rounding,
    round_activations,
    round_to_codes,
    scale_of,
    to_codes,
)

__all__ = [
    "BLOCK_COLUMNS",
    "Blocks",
    "IntegerLinear",
    "RoundedLinear",
    "encode",
    "unavailable",
]

# Columns of a block with one scale, in the only size that a GPU's kernels support.
BLOCK_COLUMNS = 128


@dataclass(frozen=True)
class Blocks:
    """The blocks of a matrix whose numbers share a scale.

    Attributes:
        rows, columns: size of a block; 0 means all rows, or all columns, of the matrix.
    """

    rows: int
    columns: int

    def spread(self, scales: Tensor, rows: Tensor, columns: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the scale of each number of a part of a matrix, `[len(rows), len(columns)]`.

        Args:
            scales: `[num_blocks_of_rows, num_blocks_of_columns]` float32, of the whole matrix.
            rows: indices of the part's rows in the matrix, int64.
            columns: indices of the part's columns in the matrix, int64.
            shape: shape of the matrix.
        """
        high, wide = self.rows or shape[0], self.columns or shape[1]
        return scales[rows // high][:, columns // wide]

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the scales of a matrix of this shape."""
        high, wide = self.rows or shape[0], self.columns or shape[1]
        return -(-shape[0] // high), -(-shape[1] // wide)


def unavailable(codes: torch.dtype = CODES) -> str:
    """Return why the GPU cannot multiply codes of this dtype; empty if it can."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability()
    if codes is torch.int8:
        return "" if major >= 8 else f"the GPU ({major}.{minor}) is older than our kernels"
    return "" if (major, minor) >= (8, 9) else f"the GPU ({major}.{minor}) has no E4M3"


def encode(
    matrix: Tensor, blocks: Blocks, codes_dtype: torch.dtype = CODES, num_scales: int = 1
) -> tuple[Tensor, Tensor]:
    """Round a matrix to codes with scales.

    Args:
        matrix: `[rows, columns]`, a floating dtype.
        blocks: the blocks of numbers that share a scale.
        codes_dtype: E4M3 or int8.
        num_scales: number of scales that are tried for each block: the smallest one with which all
            numbers fit, and larger ones, up to twice as large. The one with the smallest sum of
            squared errors is used.

    Returns:
        Codes of the shape of `matrix`, and float32 scales of shape `blocks.scales_shape`.
    """
    numbers = matrix.float()
    shape = numbers.shape
    high, wide = blocks.rows or shape[0], blocks.columns or shape[1]
    num_high, num_wide = blocks.scales_shape(shape)
    padding = (0, num_wide * wide - shape[1], 0, num_high * high - shape[0])
    parts = torch.nn.functional.pad(numbers, padding).view(num_high, high, num_wide, wide)
    least = scale_of(parts.abs().amax((1, 3)), codes_dtype)
    scales, codes = least, to_codes(parts / least[:, None, :, None], codes_dtype)
    if num_scales > 1:
        error = _squared_error(parts, codes, scales)
    for index in range(1, num_scales):
        other = least * 2 ** (index / num_scales)
        others = to_codes(parts / other[:, None, :, None], codes_dtype)
        found = _squared_error(parts, others, other)
        is_better = found < error
        error, scales = torch.minimum(error, found), torch.where(is_better, other, scales)
        # Some devices cannot select 8-bit floats.
        mine, theirs = codes.view(torch.uint8), others.view(torch.uint8)
        codes = torch.where(is_better[:, None, :, None], theirs, mine).view(codes_dtype)
    return codes.view(num_high * high, -1)[: shape[0], : shape[1]].contiguous(), scales


def _squared_error(parts: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Return the sum of squared errors of each block; see `encode`."""
    return (codes.float() * scales[:, None, :, None] - parts).square_().sum((1, 3))


class RoundedLinear(PackedLinear):
    """The reference for products in E4M3: rounded activations times float32 weights.

    Several matrices may be stacked; each may round activations in its own way.
    """

    def __init__(
        self,
        parts: Sequence[tuple[Tensor, Rounding | None]],
        bias: Tensor | None,
    ) -> None:
        """Pack a product for each part.

        Args:
            parts: for each stacked matrix, `[rows, in_features]` float32 and the rounding of its
                activations.
            bias: `[out_features]` of all parts together, or `None`.
        """
        super().__init__(parts[0][0].shape[1], sum(len(matrix) for matrix, _ in parts))
        self._products: list[tuple[PackedLinear, Rounding | None]] = []
        first = 0
        for matrix, rounding in parts:
            own = None if bias is None else bias[first : first + len(matrix)].float()
            self._products.append((pack_plain(matrix, own), rounding))
            first += len(matrix)
        # Tokens are rounded one by one. The rest of the batch therefore affects a token only as
        # much as it does in the float32 product.
        self.implementation = self._products[0][0].implementation

    @property
    def size_bytes(self) -> int:
        return sum(product.size_bytes for product, _ in self._products)

    def __call__(self, x: Tensor) -> Tensor:
        made = [
            product(x.float() if rounding is None else round_activations(x, rounding))
            for product, rounding in self._products
        ]
        return (made[0] if len(made) == 1 else torch.cat(made, dim=1)).to(x.dtype)

    def unpack(self) -> Tensor:
        """Return the float32 `[out_features, in_features]` numbers that the codes stand for."""
        return torch.cat([product.unpack() for product, _ in self._products])

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:  # noqa: ARG002
        """Raise an error: only quantized weights can replace quantized weights.

        Raises:
            ValueError: always.
        """
        raise ValueError("floats cannot replace a matrix in fp8; pack it again")


class IntegerLinear(PackedLinear):
    """A linear layer with int8 weights and activations on a CPU.

    Sums of integers are exact, and are multiplied by their scales once. Several matrices may be
    stacked; each may round activations in its own way.
    """

    implementation = "torch"

    def __init__(
        self, parts: Sequence[tuple[Tensor, Tensor, Rounding]], bias: Tensor | None
    ) -> None:
        """Keep the codes, scales and roundings.

        Args:
            parts: for each stacked matrix, int8 codes `[rows, in_features]`, their float32 scales
                `[rows, 1]`, and the rounding of its activations: to int8, with one scale per token.
            bias: `[out_features]` of all parts together, or `None`.
        """
        super().__init__(parts[0][0].shape[1], sum(len(codes) for codes, _, _ in parts))
        self._parts = [(codes.contiguous(), scales, by) for codes, scales, by in parts]
        self._bias = None if bias is None else bias.float()

    @property
    def size_bytes(self) -> int:
        bias = 0 if self._bias is None else self._bias.nbytes
        return bias + sum(codes.nbytes + scales.nbytes for codes, scales, _ in self._parts)

    def __call__(self, x: Tensor) -> Tensor:
        made = []
        for weight, scales, rounding in self._parts:
            codes, x_scales = round_to_codes(x, rounding)
            product = torch._int_mm(codes, weight.t()).float()
            made.append(product.mul_(x_scales).mul_(scales.t()))
        out = made[0] if len(made) == 1 else torch.cat(made, dim=1)
        return (out if self._bias is None else out.add_(self._bias)).to(x.dtype)

    def unpack(self) -> Tensor:
        """Return the float32 `[out_features, in_features]` numbers that the codes stand for."""
        return torch.cat([codes.float() * scales for codes, scales, _ in self._parts])

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:  # noqa: ARG002
        """Raise an error: only quantized weights can replace quantized weights.

        Raises:
            ValueError: always.
        """
        raise ValueError("floats cannot replace a matrix in int8; pack it again")
