"""Experts with weights in E4M3 or int8 on a GPU; the kernels of both products read the codes.

The rows of all experts form one matrix of codes, with a scale per row or per 128 columns of a row.
If the scheme rounds activations, the input of each product is rounded first, and the tensor cores
multiply codes by codes. Otherwise the kernel converts the weight's codes to bfloat16.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913, C901 a kernel's parameters, and its variants, of which one is compiled

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import Gate
from kernels.activation.triton import gated
from kernels.experts import ExpertBiases
from kernels.experts.triton import ExpertsInCodes, SortedProduct
from kernels.fp8_linear import BLOCK_COLUMNS
from kernels.linear.triton_invariant import Tile
from kernels.rounding import Rounding
from kernels.rounding.triton import round_tokens
from kernels.triton_support.device import SharedMemory, shared_memory

# Tiles by the average number of tokens per expert, as an upper bound. A tile is: rows of a block,
# tokens, columns of a step, warps, steps in flight.
TILES = (
    (16, Tile(64, 16, BLOCK_COLUMNS, 4, 4)),
    (32, Tile(64, 32, BLOCK_COLUMNS, 4, 4)),
    (96, Tile(64, 64, BLOCK_COLUMNS, 4, 4)),
)
MANY = Tile(128, 128, BLOCK_COLUMNS, 8, 3)


@triton.jit
def add_product(acc, weight, x, scale, x_scale, ROUNDED: tl.constexpr, BLOCKS: tl.constexpr,
                FAST: tl.constexpr):  # fmt: skip
    """Return `acc` plus the product of one step; both scales belong to the step's columns."""
    if not ROUNDED:
        # This is exact: bfloat16 has more bits than E4M3 and int8, and a wider range.
        weight = weight.to(tl.float32).to(tl.bfloat16)
    if FAST:
        acc = tl.dot(weight, x, acc=acc)
    else:
        # Steps are added outside of the matrix instruction, whose own sums have few bits for 8-bit
        # operands.
        product = tl.dot(weight, x).to(tl.float32)
        if BLOCKS:
            product *= scale[:, None]
            if ROUNDED:
                product *= x_scale[None, :]
        acc += product
    return acc


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def eight_bits_product_kernel(
    x_ptr,
    x_scale_ptr,
    code_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    block_expert_ptr,
    num_rows,
    num_tokens,
    width,
    all_rows,
    in_features,
    ROWS_OF_X: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    FAST: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply one block of an expert's rows by `BLOCK_N` rows of its weight.

    The kernel works as `kernels.experts.triton_kernels.product_kernel`. `all_rows` is the number of
    rows of all experts, and `num_tokens` is the number of rows of `x`.
    """
    program = tl.program_id(0)
    features = tl.cdiv(width, BLOCK_N)
    block = program // features
    expert = tl.load(block_expert_ptr + block)
    if expert >= 0:
        row = tl.load(order_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        feature = (program % features) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Indices past an end repeat the last row, so that loads need no mask.
        x_row = tl.minimum(row, num_rows - 1) // ROWS_OF_X
        halves: tl.constexpr = 1 if ACTIVATION is None else 2
        weight_row = expert * halves * width + tl.minimum(feature, width - 1)
        code_ptrs = code_ptr + weight_row.to(tl.int64)[:, None] * in_features
        up_ptrs = code_ptrs + width.to(tl.int64) * in_features
        x_ptrs = x_ptr + x_row[:, None] * in_features
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        # Scales of rows are used after the loop.
        scale = tl.zeros([BLOCK_N], tl.float32)
        up_scale = scale
        x_scale = tl.zeros([BLOCK_M], tl.float32)
        for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
            k = start + tl.arange(0, BLOCK_K)
            inside = (k < in_features)[None, :]
            if EVEN_K:
                x = tl.load(x_ptrs + k[None, :])
                weight = tl.load(code_ptrs + k[None, :], eviction_policy="evict_first")
            else:
                x = tl.load(x_ptrs + k[None, :], mask=inside, other=0.0)
                weight = tl.load(code_ptrs + k[None, :], mask=inside, other=0.0)
            if BLOCKS:
                at = start // BLOCK_K
                scale = tl.load(scale_ptr + at * all_rows + weight_row)
                if ROUNDED:
                    x_scale = tl.load(x_scale_ptr + at * num_tokens + x_row)
            x = tl.trans(x)
            acc = add_product(acc, weight, x, scale, x_scale, ROUNDED, BLOCKS, FAST)
            if ACTIVATION is not None:
                if EVEN_K:
                    up = tl.load(up_ptrs + k[None, :], eviction_policy="evict_first")
                else:
                    up = tl.load(up_ptrs + k[None, :], mask=inside, other=0.0)
                if BLOCKS:
                    up_scale = tl.load(scale_ptr + at * all_rows + weight_row + width)
                acc_up = add_product(acc_up, up, x, up_scale, x_scale, ROUNDED, BLOCKS, FAST)
        if not BLOCKS:
            acc *= tl.load(scale_ptr + weight_row)[:, None]
            if ACTIVATION is not None:
                acc_up *= tl.load(scale_ptr + weight_row + width)[:, None]
            if ROUNDED:
                x_scale = tl.load(x_scale_ptr + x_row)
                acc *= x_scale[None, :]
                acc_up *= x_scale[None, :]
        kind = out_ptr.dtype.element_ty
        if HAS_BIAS:
            acc += tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
            if ACTIVATION is not None:
                acc_up += tl.load(bias_ptr + weight_row + width).to(tl.float32)[:, None]
        if ACTIVATION is not None:
            # The products are rounded, as two separate kernels would round them.
            gate, up = acc.to(kind).to(tl.float32), acc_up.to(kind).to(tl.float32)
            acc = gated(gate, up, ACTIVATION)
        tl.store(
            out_ptr + row[None, :] * width + feature[:, None],
            acc.to(kind),
            mask=(feature < width)[:, None] & (row < num_rows)[None, :],
        )


def stages_of(tile: Tile, halves: int, itemsize: int, shared: SharedMemory) -> int:
    """Return how many of the tile's steps in flight fit in shared memory.

    Args:
        tile: the product's tile.
        halves: rows of the weight for each column of the result: two (gate and up) or one.
        itemsize: bytes of a number of the tokens.
        shared: the shared memory of the device.
    """
    return shared.stages(
        tile.num_stages, (halves * tile.rows + tile.tokens * itemsize) * tile.columns
    )


class EightBitMatrix:
    """The weight matrices of all experts, stacked along the rows and quantized to codes.

    Attributes:
        codes: `[num_experts * rows, columns]` E4M3 or int8, contiguous.
        scales: `[num_experts * rows, num_groups]` float32, a view whose transpose is contiguous:
            one scale per row, or one per 128 columns of a row.
        rounding: how the input is rounded; `None` if it is not.
    """

    def __init__(self, codes: Tensor, scales: Tensor, rounding: Rounding | None) -> None:
        """Keep the arguments, which are the attributes of the same names."""
        self.codes, self.rounding = codes, rounding
        self.scales = scales.t().contiguous().t()

    @property
    def has_blocks(self) -> bool:
        """Whether there is one scale per 128 columns of a row, instead of one per row."""
        return self.scales.shape[1] > 1

    def tensors(self) -> list[Tensor]:
        """Return the codes and the scales."""
        return [self.codes, self.scales]

    def numbers(self, rows: slice) -> Tensor:
        """Return the float32 numbers that the codes of some rows represent."""
        scales = self.scales[rows]
        if self.has_blocks:
            scales = scales.repeat_interleave(BLOCK_COLUMNS, 1)[:, : self.codes.shape[1]]
        return self.codes[rows].float() * scales

    def take(self, other: EightBitMatrix) -> None:
        """Copy the codes and scales of a matrix of the same form into our memory."""
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)
        if self.rounding is not None and self.rounding.scale is not None:
            assert other.rounding is not None
            assert other.rounding.scale is not None
            self.rounding.scale.copy_(other.rounding.scale)

    def fits(self, other: EightBitMatrix) -> bool:
        """Whether `other` has the same shapes, dtypes and rounding, so that `take` may copy it."""

        def form(rounding: Rounding | None) -> tuple[object, ...]:
            if rounding is None:
                return ()
            return rounding.group, rounding.codes, rounding.scale is None

        return (
            self.codes.shape == other.codes.shape
            and self.codes.dtype == other.codes.dtype
            and self.scales.shape == other.scales.shape
            and form(self.rounding) == form(other.rounding)
        )


class EightBitExperts(ExpertsInCodes[EightBitMatrix]):
    """Experts with weights in E4M3 or int8."""

    def __init__(self, gate_up: EightBitMatrix, down: EightBitMatrix, num_experts: int) -> None:
        """Keep the matrices of all experts; see `ExpertsInCodes`."""
        super().__init__(gate_up, down, num_experts, down.codes.shape[1])

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        activation: Gate,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        average = expert_ids.numel() / self.num_experts
        tile = next((tile for most, tile in TILES if average <= most), MANY)
        return self.run(x, expert_ids, weights, activation, tile, biases)

    def multiply(self, product: SortedProduct) -> None:
        x, weight, tile = product.x, self.matrices[product.which], product.tile
        # If nothing is rounded, this pointer is not read.
        x_scales = weight.scales
        if weight.rounding is not None:
            rounded = round_tokens(x, weight.rounding)
            x, x_scales = rounded.codes, rounded.scales
        eight_bits_product_kernel[product.grid](
            x,
            x_scales,
            weight.codes,
            weight.scales,
            **product.launch(),
            num_tokens=len(x),
            all_rows=len(weight.codes),
            ROUNDED=weight.rounding is not None,
            BLOCKS=weight.has_blocks,
            # As with `use_fast_accum` of the linear product of many tokens. Large tiles have no
            # registers for another sum.
            FAST=tile == MANY and not weight.has_blocks and x.dtype is not torch.int8,
            BLOCK_K=tile.columns,
            STAGES=stages_of(tile, product.halves, x.itemsize, shared_memory(x.device)),
        )

    def unpack_one(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the float32 numbers that one expert's codes represent."""
        gate_up, down = (
            weight.numbers(slice(expert * size, (expert + 1) * size))
            for weight in self.matrices.values()
            for size in [len(weight.codes) // self.num_experts]
        )
        return gate_up, down
