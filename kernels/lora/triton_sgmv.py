"""The kernels of `kernels.lora.triton`: shrink each token to its adapter's rank, expand and add.

Tokens are listed by adapter, in blocks of one adapter each; the last blocks are those of tokens
without an adapter, whose slot is `num_slots`. Programs without a block exit immediately. The
columns of A are split among programs, because few tokens would leave most of a GPU idle.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation.triton import activated
from kernels.experts.triton import most_blocks
from kernels.experts.triton_kernels import sort_kernel
from kernels.lora import TokenSlots
from kernels.triton_support.launch import start_next, wait_for_inputs
from kernels.triton_support.split_k import leave_part, sum_parts

# A matrix instruction has at least 16 rows. From `_MANY_TOKENS` on, blocks are larger: most of
# their rows are then in use.
_BLOCK = 16
_MANY_TOKENS = 512
_MANY_BLOCK = 64
_CHUNK = 1024


@triton.jit(do_not_specialize=["num_tokens", "num_places", "num_slots"])
def shrink_kernel(
    x_ptr,
    memory_ptr,
    ranks_ptr,
    order_ptr,
    block_slot_ptr,
    shrunk_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_places,
    num_slots,
    in_features,
    slot_stride,
    rank_stride,
    EVEN_K: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of tokens by some columns of A, for one part of the product.

    `shrunk` is `[PARTS, num_places, RANKS]`; a place is a token's index in the list. Ranks that are
    not in use get zeros. Nothing is written for tokens without a slot.
    """
    block, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_next(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(block_slot_ptr + block)
    if (slot < 0) | (slot >= num_slots):
        return
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(order_ptr + place)
    # Padding repeats the last token, so that loads need no mask.
    x_ptrs = x_ptr + tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * in_features
    rank = tl.arange(0, RANKS)
    is_rank = rank < tl.load(ranks_ptr + slot)
    base = memory_ptr + slot.to(tl.int64) * slot_stride + part * in_features
    a_ptrs = base + rank.to(tl.int64)[:, None] * rank_stride
    acc = tl.zeros([BLOCK_M, RANKS], tl.float32)
    share = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLIT) * BLOCK_K
    last = tl.minimum((split + 1) * share, in_features)
    for start in range(split * share, last, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            x = tl.load(x_ptrs + k[None, :])
            a = tl.load(a_ptrs + k[None, :], mask=is_rank[:, None], other=0.0)
        else:
            inside = (k < in_features)[None, :]
            x = tl.load(x_ptrs + k[None, :], mask=inside, other=0.0)
            a = tl.load(a_ptrs + k[None, :], mask=is_rank[:, None] & inside, other=0.0)
        acc = tl.dot(x, tl.trans(a), acc=acc, input_precision=PRECISION)
    if SPLIT > 1:
        index = block * PARTS + part
        before = leave_part(acc, partial_ptr, arrived_ptr, index, split, SPLIT, BLOCK_M, RANKS)
        if before != SPLIT - 1:
            return
        acc = sum_parts(partial_ptr, arrived_ptr, index, SPLIT, BLOCK_M, RANKS)
    row = (part * num_places + place).to(tl.int64)
    to = shrunk_ptr + row[:, None] * RANKS + rank[None, :]
    tl.store(to, acc.to(shrunk_ptr.dtype.element_ty))


@triton.jit
def expanded_block(
    memory_ptr,
    shrunk_ptr,
    slot,
    ranks,
    place,
    part,
    in_memory,
    inside,
    num_places,
    slot_stride,
    rank_stride,
    RANKS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return a block's shrunk tokens times columns of B, in float32."""
    rank = tl.arange(0, RANKS)
    is_rank = rank < ranks
    base = memory_ptr + slot.to(tl.int64) * slot_stride + in_memory
    b_ptrs = base + rank.to(tl.int64)[:, None] * rank_stride + tl.arange(0, BLOCK_N)[None, :]
    b = tl.load(b_ptrs, mask=is_rank[:, None] & inside[None, :], other=0.0)
    row = (part * num_places + place).to(tl.int64)
    shrunk_ptrs = shrunk_ptr + row[:, None] * RANKS + rank[None, :]
    shrunk = tl.load(shrunk_ptrs, mask=is_rank[None, :], other=0.0)
    return tl.dot(shrunk, b, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens", "num_places", "num_slots"])
def expand_kernel(
    product_ptr,
    out_ptr,
    memory_ptr,
    ranks_ptr,
    order_ptr,
    block_slot_ptr,
    shrunk_ptr,
    tiles_ptr,
    num_tokens,
    num_places,
    num_slots,
    in_features,
    out_features,
    half,
    slot_stride,
    rank_stride,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of shrunk tokens by some columns of B and add the result to the product.

    A tile is four int32: the part of the product, the tile's first column in the product and in an
    entry of `memory`, and its number of columns. With an activation, the product's halves are the
    two parts, gate and up; `out` has the columns of one half, and there are no tiles.
    """
    block = tl.program_id(0)
    if ACTIVATION is None:
        tile_ptr = tiles_ptr + tl.program_id(1) * 4
        part, first = tl.load(tile_ptr), tl.load(tile_ptr + 1)
        in_memory, width = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    else:
        part, first = 0, tl.program_id(1) * BLOCK_N
        in_memory, width = 2 * in_features + first, half - first
    start_next(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(block_slot_ptr + block)
    if slot < 0:
        return
    if (ACTIVATION is None) & (slot >= num_slots):
        # These tokens keep their bits.
        return
    ranks = tl.load(ranks_ptr + slot, mask=slot < num_slots, other=0)
    place = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(order_ptr + place)
    column = tl.arange(0, BLOCK_N)
    inside = column < width
    is_out = (token < num_tokens)[:, None] & inside[None, :]
    at = token.to(tl.int64)[:, None] * out_features + first + column[None, :]
    old = tl.load(product_ptr + at, mask=is_out, other=0.0)
    result = old.to(tl.float32) + expanded_block(
        memory_ptr, shrunk_ptr, slot, ranks, place, part, in_memory, inside, num_places,
        slot_stride, rank_stride, RANKS, BLOCK_N, PRECISION,
    )  # fmt: skip
    if ACTIVATION is None:
        tl.store(out_ptr + at, result.to(old.dtype), mask=is_out)
    else:
        up = tl.load(product_ptr + half + at, mask=is_out, other=0.0).to(tl.float32)
        up += expanded_block(
            memory_ptr, shrunk_ptr, slot, ranks, place, 1, in_memory + half, inside, num_places,
            slot_stride, rank_stride, RANKS, BLOCK_N, PRECISION,
        )  # fmt: skip
        # The gate is rounded like a product, and then as in `kernels.activation.triton`.
        gate = result.to(old.dtype).to(tl.float32)
        gated = activated(gate, ACTIVATION) * up.to(old.dtype).to(tl.float32)
        to = token.to(tl.int64)[:, None] * half + first + column[None, :]
        tl.store(out_ptr + to, gated.to(old.dtype), mask=is_out)


class _Listed(NamedTuple):
    """A step's tokens sorted by slot, in blocks of `size`.

    Attributes:
        order: the token at each place; the number of tokens stands for padding.
        block_slot: the slot of each block; the number of slots for tokens without an adapter, and
            -1 for a block without tokens.
    """

    order: Tensor
    block_slot: Tensor
    size: int


def listed(tokens: TokenSlots) -> _Listed:
    """Return the list of a step's tokens; it is made at the first call."""
    if isinstance(tokens.derived, _Listed):
        return tokens.derived
    num_tokens, num_slots, device = len(tokens), tokens.num_slots, tokens.slots.device
    size = _BLOCK if num_tokens < _MANY_TOKENS else _MANY_BLOCK
    # Tokens without a slot are listed last.
    num_lists = num_slots + 1
    num_blocks = most_blocks(num_tokens, num_lists, size)
    order = torch.empty(num_blocks * size, dtype=torch.int32, device=device)
    block_slot = torch.empty(num_blocks, dtype=torch.int32, device=device)
    sort_kernel[(num_lists,)](
        torch.where(tokens.slots < 0, num_slots, tokens.slots),
        order,
        block_slot,
        num_tokens,
        num_blocks,
        num_lists,
        BLOCK_M=size,
        CHUNK=_CHUNK,
        BINS=triton.next_power_of_2(num_lists + 1),
        num_warps=4,
    )
    tokens.derived = made = _Listed(order, block_slot, size)
    return made
