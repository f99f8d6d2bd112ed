"""Experts with weights quantized to 4 or 8 bits (codes) on a GPU; the products decode them.

The rows of all experts form one matrix in the layout of `kernels.group_linear.triton`. An expert's
weight begins at a row of this matrix, and its products are those of a quantized linear layer. If
experts have many tokens, their codes are converted to 16-bit numbers in memory, some experts at a
time.

Microseconds of a layer of Qwen3-30B-A3B on an H200 (`benchmarks.h200.experts --forms w4a16`):

    weights      1 token  64 tokens  1024 tokens
    4-bit codes       28        122          328
    bf16              40        314          601
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import Gate
from kernels.activation.triton import gated
from kernels.experts import ExpertBiases
from kernels.experts.triton import TILES as PLAIN_TILES
from kernels.experts.triton import ExpertsInCodes, SortedProduct, multiply
from kernels.group_linear import BITS, Form, Grouped
from kernels.group_linear.triton import STEP, PackedCodes, pack_codes, widen
from kernels.group_linear.triton_codes import PLANE, add_step
from kernels.linear.triton_invariant import Tile
from kernels.triton_support.device import SharedMemory, interpreted, shared_memory

# Tiles by the average number of tokens per expert, as an upper bound. A tile is: rows of a block,
# tokens, columns of a step, warps, steps in flight.
TILES = (
    (16, Tile(64, 16, STEP, 4, 4)),
    (32, Tile(64, 32, STEP, 4, 4)),
    (96, Tile(64, 64, STEP, 4, 3)),
    (128, Tile(128, 128, STEP, 8, 3)),
)
# With more tokens, codes are converted to 16 bits before the product. Converting inside the product
# took 1.4 to 2.4 times as long as bf16 with 256 and 512 tokens for each expert.
MANY = PLAIN_TILES[-1][1]
# One tile for every number of tokens, so that a row runs through the same instructions in every
# batch.
INVARIANT = Tile(64, 32, STEP, 4, 3)


@triton.jit(do_not_specialize=["num_rows"])
def codes_product_kernel(
    x_ptr,
    plane_ptr,
    word_ptr,
    row_scale_ptr,
    row_zero_ptr,
    bias_ptr,
    out_ptr,
    order_ptr,
    block_expert_ptr,
    num_rows,
    width,
    all_rows,
    in_features,
    ROWS_OF_X: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
):
    """Multiply `BLOCK_M` tokens of one expert by `BLOCK_N` rows of its quantized weight.

    `ROWS_OF_X` rows of the result come from one row of `x`. With an activation the weight has two
    halves, gate and up, and one block of each is multiplied. `order_ptr`, `block_expert_ptr`,
    `num_rows` and `width` belong to `SortedProduct`. `plane_ptr`, `word_ptr`, `row_scale_ptr` and
    `row_zero_ptr` point to `codes`, `words`, `row_scales` and `row_zeros` of `PackedCodes`.
    `all_rows` is the number of weight rows of all experts together.
    """
    program = tl.program_id(0)
    features = tl.cdiv(width, BLOCK_N)
    block = program // features
    expert = tl.load(block_expert_ptr + block)
    if expert >= 0:
        row = tl.load(order_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        feature = (program % features) * BLOCK_N + tl.arange(0, BLOCK_N)
        here = feature < width
        is_token = (row < num_rows)[:, None]
        x_row = x_ptr + (tl.minimum(row, num_rows - 1) // ROWS_OF_X)[:, None] * in_features
        halves: tl.constexpr = 1 if ACTIVATION is None else 2
        weight_row = expert * halves * width + feature
        within = tl.arange(0, PLANE)
        code_row = plane_ptr + weight_row.to(tl.int64)[:, None] * PLANE + within[None, :]
        up_code_row = code_row + width.to(tl.int64) * PLANE
        middle: tl.constexpr = 128 if FORM == "int8" else 8
        zeros = tl.full([BLOCK_N], middle, tl.int32)
        up_zeros = zeros
        if GROUP == 0 and HAS_ZERO:
            zeros = tl.load(row_zero_ptr + weight_row, mask=here, other=0).to(tl.int32)
            if ACTIVATION is not None:
                up_zeros = tl.load(row_zero_ptr + weight_row + width, mask=here, other=0)
                up_zeros = up_zeros.to(tl.int32)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        acc_up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for step in tl.range(0, tl.cdiv(in_features, 128), num_stages=STAGES):
            acc = add_step(
                acc,
                x_row,
                code_row,
                word_ptr + weight_row,
                zeros,
                is_token,
                here,
                step,
                all_rows,
                in_features,
                FORM,
                GROUP,
                SCALES,
                WORDS,
                HAS_ZERO,
                EVEN_K,
                BLOCK_M,
                BLOCK_N,
                ASM,
            )
            if ACTIVATION is not None:
                acc_up = add_step(
                    acc_up,
                    x_row,
                    up_code_row,
                    word_ptr + weight_row + width,
                    up_zeros,
                    is_token,
                    here,
                    step,
                    all_rows,
                    in_features,
                    FORM,
                    GROUP,
                    SCALES,
                    WORDS,
                    HAS_ZERO,
                    EVEN_K,
                    BLOCK_M,
                    BLOCK_N,
                    ASM,
                )
        if GROUP == 0:
            scale = tl.load(row_scale_ptr + weight_row, mask=here, other=0.0)
            acc *= scale.to(tl.float32)[:, None]
            if ACTIVATION is not None:
                up_scale = tl.load(row_scale_ptr + weight_row + width, mask=here, other=0.0)
                acc_up *= up_scale.to(tl.float32)[:, None]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + weight_row, mask=here, other=0.0)
            acc += bias.to(tl.float32)[:, None]
            if ACTIVATION is not None:
                bias_up = tl.load(bias_ptr + weight_row + width, mask=here, other=0.0)
                acc_up += bias_up.to(tl.float32)[:, None]
        kind = out_ptr.dtype.element_ty
        if ACTIVATION is not None:
            # The products are rounded, as two separate kernels would round them.
            gate, up = acc.to(kind).to(tl.float32), acc_up.to(kind).to(tl.float32)
            acc = gated(gate, up, ACTIVATION)
        tl.store(
            out_ptr + row[None, :] * width + feature[:, None],
            acc.to(kind),
            mask=here[:, None] & (row < num_rows)[None, :],
        )


def stages_of(tile: Tile, form: Form, halves: int, itemsize: int, shared: SharedMemory) -> int:
    """Return how many of the tile's steps in flight fit in shared memory.

    The number of steps does not change the result.
    """
    weight_bytes = tile.rows * (STEP * BITS[form] // 8 + 12)
    # Both halves of a gated product read the same columns of the tokens.
    return shared.stages(tile.num_stages, halves * weight_bytes + STEP * tile.tokens * itemsize)


class CodedExperts(ExpertsInCodes[PackedCodes]):
    """Experts with weights quantized to 4 or 8 bits (codes), with scales per group of columns.

    Attributes:
        slice_bytes: most bytes of 16-bit weights that are converted from codes at a time.
    """

    slice_bytes = 128 * 1024 * 1024

    def __init__(
        self, gate_up: PackedCodes, down: PackedCodes, num_experts: int, *, is_invariant: bool
    ) -> None:
        """Keep the packed weights of all experts.

        Args:
            gate_up: `[num_experts * 2 * intermediate_size, hidden_size]`, the rows of each expert's
                gate before those of its up.
            down: `[num_experts * hidden_size, intermediate_size]`.
            num_experts: number of experts on this rank.
            is_invariant: whether a token's result must have the same bits in every batch.
        """
        super().__init__(gate_up, down, num_experts, down.columns)
        self._is_invariant = is_invariant

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        activation: Gate,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        tile = INVARIANT if self._is_invariant else self.tile_of(expert_ids.numel())
        return self.run(x, expert_ids, weights, activation, tile, biases)

    def tile_of(self, num_rows: int) -> Tile:
        """Return the tile for products of `num_rows` rows over all experts."""
        average = num_rows / self.num_experts
        return next((tile for most, tile in TILES if average <= most), MANY)

    def multiply(self, product: SortedProduct) -> None:
        x, weight = product.x, self.matrices[product.which]
        if product.tile == MANY:
            self._multiply_many(product)
            return
        codes_product_kernel[product.grid](
            x,
            *weight.pointers(),
            **product.launch(),
            all_rows=weight.rows,
            **weight.constants(),
            STAGES=stages_of(
                product.tile, weight.form, product.halves, x.itemsize, shared_memory(x.device)
            ),
            ASM=not interpreted(),
        )

    def _multiply_many(self, product: SortedProduct) -> None:
        x, weight = product.x, self.matrices[product.which]
        size = weight.rows // self.num_experts
        of_slice = max(1, self.slice_bytes // (size * weight.columns * x.itemsize))
        space = x.new_empty(min(of_slice, self.num_experts), size, weight.columns)
        for first in range(0, self.num_experts, of_slice):
            count = min(of_slice, self.num_experts - first)
            numbers = space[:count]
            widen(weight, first * size, count * size, numbers.flatten(0, 1))
            multiply(product, numbers, first)

    def grouped(self, which: Literal["gate_up", "down"], expert: int) -> Grouped:
        """Return one expert's codes as they were packed; see `PackedCodes.grouped`."""
        weight = self.matrices[which]
        size = weight.rows // self.num_experts
        rows = slice(expert * size, (expert + 1) * size)
        one = replace(
            weight,
            codes=weight.codes[:, rows],
            words=weight.words[:, rows],
            row_scales=weight.row_scales[rows],
            row_zeros=None if weight.row_zeros is None else weight.row_zeros[rows],
        )
        return one.grouped()

    def unpack_one(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the float32 numbers that one expert's codes represent."""
        return self.grouped("gate_up", expert).numbers(), self.grouped("down", expert).numbers()


def pack(
    gate_up: Grouped, down: Grouped, num_experts: int, *, is_invariant: bool
) -> CodedExperts | None:
    """Pack the quantized weights of all experts for the kernels.

    Returns `None` if no kernel supports their groups, or if columns are permuted (act order).

    Args:
        gate_up: `[num_experts * 2 * intermediate_size, hidden_size]`, the rows of each expert's
            gate before those of its up.
        down: `[num_experts * hidden_size, intermediate_size]`.
        num_experts: number of experts on this rank.
        is_invariant: whether a token's result must have the same bits in every batch.
    """
    if gate_up.order is not None or down.order is not None:
        return None
    packed = pack_codes(gate_up), pack_codes(down)
    if packed[0] is None or packed[1] is None:
        return None
    return CodedExperts(packed[0], packed[1], num_experts, is_invariant=is_invariant)
