"""The kernels of `kernels.lora.triton`: shrink each token to its adapter's rank, expand and add.

Tokens are listed by adapter, in blocks of one adapter each. Programs without a block exit
immediately. The columns of A are split among programs, because few tokens would leave most of a GPU
idle.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import triton
import triton.language as tl

from kernels.triton_support.launch import start_next, wait_for_inputs


@triton.jit(do_not_specialize=["num_tokens", "num_places"])
def shrink_kernel(
    x_ptr,
    memory_ptr,
    ranks_ptr,
    order_ptr,
    block_slot_ptr,
    made_ptr,
    num_tokens,
    num_places,
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

    `made` is `[SPLIT, PARTS, num_places, RANKS]` float32; a place is a token's index in the list.
    """
    block, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_next(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(block_slot_ptr + block)
    if slot >= 0:
        place = block * BLOCK_M + tl.arange(0, BLOCK_M)
        token = tl.load(order_ptr + place)
        is_token = token < num_tokens
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
        row = (split * PARTS + part) * num_places + place
        to = made_ptr + row.to(tl.int64)[:, None] * RANKS + rank[None, :]
        tl.store(to, acc, mask=is_token[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["num_tokens", "num_places"])
def expand_kernel(
    out_ptr,
    memory_ptr,
    ranks_ptr,
    order_ptr,
    block_slot_ptr,
    made_ptr,
    tiles_ptr,
    num_tokens,
    num_places,
    out_features,
    slot_stride,
    rank_stride,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of shrunk tokens by some columns of B and add the result to the product.

    A tile is four int32: the part of the product, the tile's first column in the product and in an
    entry of `memory`, and its number of columns.
    """
    block = tl.program_id(0)
    tile_ptr = tiles_ptr + tl.program_id(1) * 4
    part, first = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    in_memory, width = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    start_next(PDL)
    wait_for_inputs(PDL)
    slot = tl.load(block_slot_ptr + block)
    if slot >= 0:
        place = block * BLOCK_M + tl.arange(0, BLOCK_M)
        token = tl.load(order_ptr + place)
        is_token = token < num_tokens
        rank = tl.arange(0, RANKS)
        is_rank = rank < tl.load(ranks_ptr + slot)
        column = tl.arange(0, BLOCK_N)
        inside = column < width
        base = memory_ptr + slot.to(tl.int64) * slot_stride + in_memory
        b_ptrs = base + rank.to(tl.int64)[:, None] * rank_stride + column[None, :]
        b = tl.load(b_ptrs, mask=is_rank[:, None] & inside[None, :], other=0.0)
        to = out_ptr + token.to(tl.int64)[:, None] * out_features + first + column[None, :]
        is_out = is_token[:, None] & inside[None, :]
        old = tl.load(to, mask=is_out, other=0.0)
        shrunk = tl.zeros([BLOCK_M, RANKS], tl.float32)
        for split in tl.static_range(SPLIT):
            row = (split * PARTS + part) * num_places + place
            made_ptrs = made_ptr + row.to(tl.int64)[:, None] * RANKS + rank[None, :]
            shrunk += tl.load(made_ptrs, mask=is_token[:, None] & is_rank[None, :], other=0.0)
        added = tl.dot(shrunk.to(b.dtype), b, input_precision=PRECISION)
        tl.store(to, (old.to(tl.float32) + added).to(old.dtype), mask=is_out)
