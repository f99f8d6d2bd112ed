"""Linear layers with quantized weights (codes) on a GPU.

For up to `MAX_TOKENS` tokens, a kernel of ours reads the codes once for every 64 tokens and
converts them to numbers in registers. For more tokens, the matrix is converted to 16-bit numbers in
memory, a slice of rows at a time. A slice stays in the L2 cache until cuBLAS has multiplied by it.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.group_linear import BITS, Form, Grouped, GroupedLinear, triton_codes
from kernels.group_linear.triton_codes import few_kernel, widen_kernel
from kernels.linear import PackedLinear
from kernels.triton_support import split_k
from kernels.triton_support.device import interpreted, multiprocessors, shared_memory
from kernels.triton_support.launch import launch_options

# The most tokens for the product with codes. For more tokens, codes are converted to 16 bits first.
MAX_TOKENS = 256
TOKEN_BLOCKS = (16, 32, 64)
# Bytes of a slice of rows in 16 bits.
SLICE_BYTES = 32 * 1024 * 1024
_WIDENED_ROWS = 64
STEP: int = triton_codes.STEP.value
PLANE: int = triton_codes.PLANE.value
_SCALES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.uint8: tl.uint8}
# Most programs that share the columns of a block of rows.
_MOST_SPLIT = 8


@dataclass(frozen=True)
class Tile:
    """The sizes of a product's tile.

    Attributes:
        rows: rows of a block.
        split: number of programs that share the columns of a block.
        num_warps, num_stages: warps of a program, and steps in flight.
    """

    rows: int
    split: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class PackedCodes:
    """A quantized matrix (codes, scales and zero points) in the layout of the kernels.

    Attributes:
        form: how a code becomes a number.
        group: number of columns that share a scale; 0 if all columns of a row share one.
        codes: `[num_blocks, rows, 32]` int16. A block has 128 columns of 4-bit codes, or 64 columns
            of 8-bit codes.
        words: `[num_words, rows]` int32, scales and zero points in the layout of
            `kernels.group_linear.triton_codes`; `[0, rows]` if `group` is 0.
        row_scales: `[rows]` in the dtype of the scales, used if `group` is 0.
        row_zeros: `[rows]` uint8, zero points, used if `group` is 0; `None` without them.
        has_zeros: whether there are zero points.
        scales_dtype: dtype of the scales; uint8 for exponents.
        columns: number of the matrix's columns.
        order: `[columns]` int64: column `i` of the codes is column `order[i]` of the matrix. `None`
            if the columns are in their original order.
    """

    form: Form
    group: int
    codes: Tensor
    words: Tensor
    row_scales: Tensor
    row_zeros: Tensor | None
    has_zeros: bool
    scales_dtype: torch.dtype
    columns: int
    order: Tensor | None

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.codes.shape[1]

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a product reads."""
        found = (self.codes, self.words, self.row_scales, self.row_zeros, self.order)
        return [tensor for tensor in found if tensor is not None]

    def fits(self, other: "PackedCodes") -> bool:
        """Whether `other` has the form of this matrix, so that `take` may copy it."""
        mine, theirs = self.tensors(), other.tensors()
        if [(t.shape, t.dtype) for t in mine] != [(t.shape, t.dtype) for t in theirs]:
            return False
        # If a step is one group, its zero point is in the word of its scale, so shapes do not show
        # whether there are zero points.
        return (self.group, self.form, self.has_zeros, self.scales_dtype) == (
            other.group,
            other.form,
            other.has_zeros,
            other.scales_dtype,
        )

    def take(self, other: "PackedCodes") -> None:
        """Copy `other` into the memory of this matrix, whose addresses CUDA graphs hold."""
        for to, tensor in zip(self.tensors(), other.tensors(), strict=True):
            to.copy_(tensor)

    def constants(self) -> dict[str, Any]:
        """Return the compile-time arguments of the kernels."""
        return {
            "FORM": self.form,
            "GROUP": self.group,
            "SCALES": _SCALES[self.scales_dtype],
            "WORDS": len(self.words) // triton.cdiv(self.columns, max(STEP, self.group)),
            "HAS_ZERO": self.has_zeros,
        }

    def pointers(self) -> tuple[Tensor, ...]:
        """Return the kernels' pointer arguments from `plane_ptr` on."""
        zeros = self.row_scales if self.row_zeros is None else self.row_zeros
        return self.codes, self.words, self.row_scales, zeros

    def grouped(self) -> Grouped:
        """Return the matrix as it was before `pack_codes`; scales of 32 bits are now of 16 bits."""
        bits = BITS[self.form]
        fields = [(self.codes >> shift) & (2**bits - 1) for shift in range(0, 16, bits)]
        codes = torch.cat(fields, -1).to(torch.uint8)
        codes = codes.transpose(0, 1).reshape(self.rows, -1)[:, : self.columns]
        if self.group == 0:
            zeros = None if self.row_zeros is None else self.row_zeros[:, None]
            scales = self.row_scales[:, None]
            return Grouped(self.form, codes, scales, zeros, self.columns, self.order)
        scales, zeros = _from_words(self)
        return Grouped(self.form, codes, scales, zeros, self.group, self.order)


def pack_codes(weight: Grouped) -> PackedCodes | None:
    """Return a quantized matrix in the kernels' layout; `None` if they do not support its groups.

    `kernels.group_linear.triton_codes` describes the layout.
    """
    if 64 < weight.group < weight.columns and weight.group % STEP and weight.group % 64 == 0:
        weight = weight.with_groups_of(64)
    group = 0 if weight.group >= weight.columns and weight.form != "mxfp4" else weight.group
    if weight.columns % 32 or group % 32 or (group > 64 and group % STEP):
        return None
    scales = weight.scales.half() if weight.scales.dtype is torch.float32 else weight.scales
    if not torch.equal(scales.float(), weight.scales.float()):
        scales = weight.scales.bfloat16()
    bits = BITS[weight.form]
    columns = -(-weight.columns // STEP) * STEP
    codes = torch.nn.functional.pad(weight.codes, (0, columns - weight.columns))
    planes = codes.view(weight.rows, -1, 16 // bits, PLANE).transpose(0, 1)
    packed = planes[:, :, 0].to(torch.int16)
    for plane in range(1, 16 // bits):
        packed |= planes[:, :, plane].to(torch.int16) << (bits * plane)
    zeros = weight.zeros
    row_scales, row_zeros = scales[:0, 0], None
    if group == 0:
        row_scales = scales[:, 0].contiguous()
        row_zeros = None if zeros is None else zeros[:, 0].contiguous()
        words = torch.empty(0, weight.rows, dtype=torch.int32, device=codes.device)
    else:
        words = _to_words(scales, zeros, group, weight.columns)
    return PackedCodes(
        weight.form,
        group,
        packed.contiguous(),
        words,
        row_scales,
        row_zeros,
        zeros is not None,
        scales.dtype,
        weight.columns,
        weight.order,
    )


def _to_words(scales: Tensor, zeros: Tensor | None, group: int, columns: int) -> Tensor:
    of_step = max(1, STEP // group)
    steps = -(-columns // max(STEP, group))

    def by_step(each: Tensor) -> Tensor:
        return torch.nn.functional.pad(each, (0, steps * of_step - each.shape[1]))

    def as_words(each: Tensor) -> Tensor:
        """Return the bytes of each step as whole words, `[rows, steps, words]`."""
        parts = each.contiguous().view(torch.uint8).view(len(each), steps, -1)
        return torch.nn.functional.pad(parts, (0, -parts.shape[2] % 4)).view(torch.int32)

    words = as_words(by_step(scales))
    if zeros is not None and group >= STEP:
        words = words | by_step(zeros).int()[..., None] << 16
    elif zeros is not None:
        words = torch.cat([words, as_words(by_step(zeros))], -1)
    return words.permute(1, 2, 0).reshape(-1, len(scales)).contiguous()


def _from_words(weight: PackedCodes) -> tuple[Tensor, Tensor | None]:
    group, dtype = weight.group, weight.scales_dtype
    of_step, count = max(1, STEP // group), -(-weight.columns // group)
    steps = -(-weight.columns // max(STEP, group))
    words = weight.words.view(steps, -1, weight.rows).permute(2, 0, 1).contiguous()
    flat = words.view(torch.uint8)
    scales = flat[..., : of_step * dtype.itemsize].contiguous().view(dtype)
    zeros = None
    if weight.has_zeros:
        zeros = flat[..., 2:3] if group >= STEP else flat[..., -4:][..., :of_step]
        zeros = zeros.reshape(weight.rows, -1)[:, :count]
    return scales.reshape(weight.rows, -1)[:, :count], zeros


def tile_of(rows: int, num_steps: int, num_tokens: int, num_processors: int) -> Tile:
    """Return the tile of a product.

    With few tokens, all programs should run at once, and as many programs as fit. The tiles were
    chosen on an H100 for weights of an 8B model with `benchmarks.h200.weight_forms --tune`.
    """
    if num_tokens > TOKEN_BLOCKS[-1]:
        return Tile(128, 1, 8, 4)
    if num_tokens > TOKEN_BLOCKS[0]:
        if triton.cdiv(rows, 64) >= 3 * num_processors:
            return Tile(128, 1, 8, 3)
        if num_steps >= 64:
            return _split(Tile(128, 1, 8, 6), rows, num_steps, num_tokens, num_processors)
        return _split(Tile(64, 1, 4, 4), rows, num_steps, num_tokens, 2 * num_processors)
    low = _split(Tile(64, 1, 4, 6), rows, num_steps, num_tokens, 4 * num_processors)
    high = _split(Tile(128, 1, 8, 3), rows, num_steps, num_tokens, 3 * num_processors)
    # A program of 128 rows counts as two.
    more = triton.cdiv(rows, 128) * high.split * 2 > triton.cdiv(rows, 64) * low.split
    return high if more else low


def _split(tile: Tile, rows: int, num_steps: int, num_tokens: int, most: int) -> Tile:
    """Return the tile with columns split among as many programs as `most` allows."""
    blocks, split = triton.cdiv(rows, tile.rows), 1
    block_m = next(block for block in TOKEN_BLOCKS if num_tokens <= block)
    while (
        split < _MOST_SPLIT
        and blocks * 2 * split <= most
        and num_steps >= 8 * split
        and split_k.fits(blocks, tile.rows * block_m, 2 * split)
    ):
        split *= 2
    return replace(tile, split=split)


def multiply_few(
    x: Tensor, weight: PackedCodes, bias: Tensor | None, tile: Tile | None = None
) -> Tensor:
    """Return `x @ weight.T + bias` without writing the decoded matrix to memory.

    Args:
        x: `[num_tokens, in_features]` bfloat16 or float16, contiguous, its columns in the weight's
            order.
        weight: the quantized integers (codes) of a matrix with `in_features` columns.
        bias: `[out_features]`, or `None`.
        tile: `None` for the tile that suits the shape. A tile that splits columns supports few
            tokens only.

    Returns:
        `[num_tokens, out_features]`, the dtype of `x`.
    """
    num_tokens, in_features = x.shape
    rows, num_steps = weight.rows, triton.cdiv(in_features, STEP)
    out = x.new_empty(num_tokens, rows)
    block_m = next((block for block in TOKEN_BLOCKS if num_tokens <= block), TOKEN_BLOCKS[-1])
    token_blocks = triton.cdiv(num_tokens, block_m)
    if tile is None:
        tile = tile_of(rows, num_steps, num_tokens, multiprocessors(x.device))
    blocks = triton.cdiv(rows, tile.rows)
    partials, arrived = out, out
    if tile.split > 1:
        partials, arrived = split_k.space(
            x.device, blocks * token_blocks, tile.rows * block_m, tile.split
        )
    few_kernel[(blocks, tile.split, token_blocks)](
        x,
        *weight.pointers(),
        out if bias is None else bias,
        out,
        partials,
        arrived,
        num_tokens,
        rows,
        in_features,
        **weight.constants(),
        HAS_BIAS=bias is not None,
        EVEN_K=in_features % STEP == 0,
        BLOCK_M=block_m,
        BLOCK_N=tile.rows,
        SPLIT_K=tile.split,
        STAGES=shared_memory(x.device).stages(
            tile.num_stages,
            STEP * (tile.rows * BITS[weight.form] // 8 + block_m * x.itemsize) + 12 * tile.rows,
        ),
        ASM=not interpreted(),
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )
    return out


def widen(weight: PackedCodes, first: int, count: int, out: Tensor) -> Tensor:
    """Write the numbers of `count` rows from row `first` on to `out`, and return `out`.

    Args:
        weight: the codes.
        first: index of the first row.
        count: number of rows.
        out: `[count, columns]`, contiguous, overwritten.
    """
    widen_kernel[(triton.cdiv(count, _WIDENED_ROWS), triton.cdiv(weight.columns, STEP))](
        *weight.pointers(),
        out,
        first,
        count,
        weight.rows,
        weight.columns,
        **weight.constants(),
        ROWS=_WIDENED_ROWS,
        num_warps=4,
    )
    return out


def multiply_many(
    x: Tensor, weight: PackedCodes, bias: Tensor | None, slice_bytes: int = SLICE_BYTES
) -> Tensor:
    """Return `x @ weight.T + bias`; cuBLAS multiplies by 16-bit numbers.

    Rows are converted in slices of about `slice_bytes`. The other arguments are those of
    `multiply_few`.
    """
    rows, columns = weight.rows, weight.columns
    count = max(1, round(rows * columns * x.itemsize / slice_bytes))
    of_slice = triton.cdiv(triton.cdiv(rows, count), 128) * 128
    space = x.new_empty(min(of_slice, rows), columns)
    out = x.new_empty(len(x), rows)
    for first in range(0, rows, of_slice):
        size = min(of_slice, rows - first)
        numbers = widen(weight, first, size, space[:size])
        torch.mm(x, numbers.t(), out=out[:, first : first + size])
    return out if bias is None else out.add_(bias)


class TritonGroupedLinear(GroupedLinear):
    """A linear layer with a quantized weight (codes) on a GPU.

    New codes are copied into the same memory, because CUDA graphs hold its addresses.
    """

    implementation = "triton"

    def __init__(self, weight: PackedCodes, bias: Tensor | None) -> None:
        """Keep the codes and the bias."""
        super().__init__(weight.columns, weight.rows)
        self.weight, self.bias = weight, bias

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight.order is not None:
            x = x.index_select(1, self.weight.order)
        if len(x) <= MAX_TOKENS:
            return multiply_few(x, self.weight, self.bias)
        return multiply_many(x, self.weight, self.bias)

    def unpack(self) -> Tensor:
        """Return the float32 numbers that the codes represent."""
        return self.weight.grouped().numbers()

    def codes(self) -> Tensor:
        return self.weight.grouped().codes

    def replace(self, other: PackedLinear) -> bool:
        if not isinstance(other, TritonGroupedLinear):
            return False
        if not self.weight.fits(other.weight) or (self.bias is None) != (other.bias is None):
            return False
        self.weight.take(other.weight)
        if self.bias is not None and other.bias is not None:
            self.bias.copy_(other.bias)
        return True

    def _tensors(self) -> list[Tensor]:
        return [*self.weight.tensors(), *([] if self.bias is None else [self.bias])]


def pack(weight: Grouped, bias: Tensor | None, dtype: torch.dtype) -> TritonGroupedLinear | None:
    """Return a quantized linear layer, `None` if unsupported; see `kernels.group_linear.pack`."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    packed = pack_codes(weight)
    return None if packed is None else TritonGroupedLinear(packed, bias)
