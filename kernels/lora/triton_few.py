"""The kernels of `kernels.lora.triton` for few tokens, which are limited by latency.

Tokens are sorted by slot and cut into blocks without padding. A block may hold tokens of several
slots. `SHARES` programs divide the slots of a block among them; each computes the tokens of its own
slots. So a program reads only the list of tokens before it reads the matrices. Products of tokens
with matrices of other slots are masked; they cause no memory traffic.

The list of a step is int32. P is its number of places, a multiple of a block's: `[token P | index
of its slot in the block P, -1 for none | slots of the block P | their ranks P | number of slots P /
BLOCK_M]`. With several tokens, the list `step` of `kernels.linear.triton.AdapterRows` follows it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import triton
import triton.language as tl

from kernels.activation.triton import activated
from kernels.triton_support.launch import start_next, wait_for_inputs


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def list_kernel(
    slots_ptr,
    ranks_ptr,
    list_ptr,
    num_tokens,
    num_slots,
    PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """List the tokens by slot, those without a slot after the others. It runs as one program."""
    token = tl.arange(0, PLACES)
    is_token = token < num_tokens
    slot = tl.load(slots_ptr + token, mask=is_token, other=-1).to(tl.int32)
    is_used = (slot >= 0) & (slot < num_slots)
    slot = tl.where(is_used, slot, 0)
    key = tl.where(is_used, slot, num_slots)
    key = tl.where(is_token, key, num_slots + 1)
    is_before = key[None, :] < key[:, None]
    is_before |= (key[None, :] == key[:, None]) & (token[None, :] < token[:, None])
    place = tl.sum(is_before.to(tl.int32), 1)
    block = place // BLOCK_M
    ahead = (block[None, :] == block[:, None]) & (place[None, :] < place[:, None])
    same = ahead & (key[None, :] == key[:, None])
    is_first = (tl.sum(same.to(tl.int32), 1) == 0) & is_used
    counted = is_first.to(tl.int32)[None, :]
    # Counts the slots whose first token in the block is this token or an earlier one.
    upto = (block[None, :] == block[:, None]) & (place[None, :] <= place[:, None])
    index = tl.sum(tl.where(upto, counted, 0), 1) - 1
    count = tl.sum(tl.where(block[None, :] == block[:, None], counted, 0), 1)
    tl.store(list_ptr + place, token)
    tl.store(list_ptr + PLACES + place, tl.where(is_used, index, -1))
    of_block = list_ptr + 2 * PLACES + block * BLOCK_M + tl.maximum(index, 0)
    # A block of one token is read as one slot even if the token has none.
    is_written = is_first | (BLOCK_M == 1)
    tl.store(of_block, slot, mask=is_written)
    rank = tl.load(ranks_ptr + slot)
    tl.store(of_block + PLACES, tl.where(is_used, rank, 0), mask=is_written)
    tl.store(list_ptr + 4 * PLACES + block, count)
    if PLACES > 1:
        step_ptr = list_ptr + 4 * PLACES + PLACES // BLOCK_M
        same = is_before & (key[None, :] == key[:, None])
        is_new = is_used & (tl.sum(same.to(tl.int32), 1) == 0)
        new = is_new.to(tl.int32)[None, :]
        index = tl.sum(tl.where(place[None, :] <= place[:, None], new, 0), 1) - 1
        tl.store(step_ptr + token, place)
        tl.store(step_ptr + PLACES + token, tl.where(is_used, index, -1))
        tl.store(step_ptr + 2 * PLACES + index, slot, mask=is_new)
        tl.store(step_ptr + 3 * PLACES + index, rank, mask=is_new)
        tl.store(step_ptr + 4 * PLACES, tl.sum(new))


@triton.jit
def of_block(list_ptr, block, num_places, BLOCK_M: tl.constexpr):
    """Read a block's part of the list.

    Returns:
        The number of each token; for each token the index of its slot among the block's slots; for
        each of those slots its number and its adapter's rank; how many slots there are.
    """
    at = list_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M)
    token, index = tl.load(at), tl.load(at + num_places)
    slots, ranks = tl.load(at + 2 * num_places), tl.load(at + 3 * num_places)
    return token, index, slots, ranks, tl.load(list_ptr + 4 * num_places + block)


@triton.jit
def chosen(values, index, BLOCK_M: tl.constexpr):
    """Return `values[index]` from registers, without a load whose latency would count."""
    return tl.sum(tl.where(tl.arange(0, BLOCK_M) == index, values, 0), 0)


@triton.jit(do_not_specialize=["num_tokens", "num_places"])
def shrink_few_kernel(
    x_ptr,
    memory_ptr,
    list_ptr,
    made_ptr,
    num_tokens,
    num_places,
    in_features,
    slot_stride,
    rank_stride,
    EVEN_K: tl.constexpr,
    PARTS: tl.constexpr,
    STEPS: tl.constexpr,
    RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of tokens by `STEPS * BLOCK_K` columns of A, for one part of the product.

    `made` is `[splits, PARTS, num_places, RANKS]` float32. Ranks that are not in use get zeros.
    Nothing is written for tokens without a slot.
    """
    block, share = tl.program_id(0) // SHARES, tl.program_id(0) % SHARES
    part, split = tl.program_id(1), tl.program_id(2)
    start_next(PDL)
    wait_for_inputs(PDL)
    token, index, slots, ranks, count = of_block(list_ptr, block, num_places, BLOCK_M)
    own = (count - share + SHARES - 1) // SHARES
    if own <= 0:
        return
    x_row = x_ptr + tl.minimum(token, num_tokens - 1).to(tl.int64)[:, None] * in_features
    rank = tl.arange(0, RANKS)
    a_row = memory_ptr + part * in_features + rank.to(tl.int64)[:, None] * rank_stride
    if BLOCK_M == 1:
        products = tl.zeros([RANKS, BLOCK_K], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, RANKS], tl.float32)
    for step in tl.range(0, own * STEPS, num_stages=STAGES):
        at = share + step // STEPS * SHARES
        this = chosen(slots, at, BLOCK_M)
        is_rank = (rank < chosen(ranks, at, BLOCK_M))[:, None]
        is_mine = (index == at)[:, None]
        k = (split * STEPS + step % STEPS) * BLOCK_K + tl.arange(0, BLOCK_K)
        if not EVEN_K:
            is_rank = is_rank & (k < in_features)[None, :]
            is_mine = is_mine & (k < in_features)[None, :]
        a = tl.load(a_row + this.to(tl.int64) * slot_stride + k[None, :], mask=is_rank, other=0.0)
        x = tl.load(x_row + k[None, :], mask=is_mine, other=0.0)
        if BLOCK_M == 1:
            products += a.to(tl.float32) * x.to(tl.float32)
        else:
            acc = tl.dot(x, tl.trans(a), acc=acc, input_precision=PRECISION)
    if BLOCK_M == 1:
        acc = tl.sum(products, 1)[None, :]
    row = (split * PARTS + part) * num_places + block * BLOCK_M + tl.arange(0, BLOCK_M)
    is_own = (index >= 0) & (index % SHARES == share)
    tl.store(made_ptr + row[:, None] * RANKS + rank[None, :], acc, mask=is_own[:, None])


@triton.jit
def columns_of(
    b_row,
    at,
    slots,
    ranks,
    count,
    inside,
    slot_stride,
    EVEN_N: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return columns of B, `[RANKS, BLOCK_N]`, for the block's slot of index `at`, if it exists."""
    is_rank = (tl.arange(0, RANKS) < chosen(ranks, at, BLOCK_M)) & (at < count)
    is_rank = is_rank[:, None]
    if not EVEN_N:
        is_rank = is_rank & inside[None, :]
    b_ptrs = b_row + chosen(slots, at, BLOCK_M).to(tl.int64) * slot_stride
    return tl.load(b_ptrs, mask=is_rank, other=0.0)


@triton.jit
def added(
    acc,
    shrunk,
    b,
    at,
    index,
    ranks,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return `acc` plus the product of the tokens of slot `at` with its columns of B."""
    # Sums of ranks that are not in use are undefined.
    is_rank = tl.arange(0, RANKS) < chosen(ranks, at, BLOCK_M)
    mine = tl.where((index == at)[:, None] & is_rank[None, :], shrunk, 0.0)
    if BLOCK_M == 1:
        acc += tl.sum(tl.trans(mine) * b.to(tl.float32), 0)[None, :]
    else:
        acc = tl.dot(mine.to(b.dtype), b, acc=acc, input_precision=PRECISION)
    return acc


@triton.jit
def expanded(
    b_row,
    b,
    shrunk,
    index,
    slots,
    ranks,
    count,
    share,
    inside,
    slot_stride,
    AHEAD: tl.constexpr,
    EVEN_N: tl.constexpr,
    RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return a block's shrunk tokens, `[BLOCK_M, RANKS]`, times columns of B, in float32.

    With `AHEAD`, `b` has the columns of the first slot.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    first = share
    if AHEAD:
        acc = added(acc, shrunk, b, share, index, ranks, RANKS, BLOCK_M, PRECISION)
        first += SHARES
    for at in tl.range(first, count, SHARES, num_stages=STAGES):
        next_b = columns_of(
            b_row, at, slots, ranks, count, inside, slot_stride, EVEN_N, RANKS, BLOCK_M
        )
        acc = added(acc, shrunk, next_b, at, index, ranks, RANKS, BLOCK_M, PRECISION)
    return acc


@triton.jit
def sum_of_splits(
    made_ptr,
    part,
    block,
    index,
    num_places,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return a block's shrunk tokens for one part, summed over the parts of A's columns."""
    row = part * num_places + block * BLOCK_M + tl.arange(0, BLOCK_M)
    at = made_ptr + row[:, None] * RANKS + tl.arange(0, RANKS)[None, :]
    shrunk = tl.zeros([BLOCK_M, RANKS], tl.float32)
    for split in tl.static_range(SPLIT):
        at_split = at + split * PARTS * num_places * RANKS
        shrunk += tl.load(at_split, mask=(index >= 0)[:, None], other=0.0)
    return shrunk


@triton.jit(do_not_specialize=["num_tokens", "num_places"])
def expand_few_kernel(
    product_ptr,
    out_ptr,
    memory_ptr,
    list_ptr,
    made_ptr,
    tiles_ptr,
    num_tokens,
    num_places,
    in_features,
    out_features,
    half,
    slot_stride,
    rank_stride,
    EVEN_N: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
    RANKS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of shrunk tokens by some columns of B and add the result to the product.

    A tile is four int32: the part of the product, the tile's first column in the product and in an
    entry of `memory`, and its number of columns. `EVEN_N` promises that a tile has `BLOCK_N`
    columns and begins at multiples of 16. With an activation, the product's halves are the two
    parts, gate and up; `out` has the columns of one half, and there are no tiles. `AHEAD` promises
    that the list was complete when the kernel before this one began.
    """
    block, share = tl.program_id(0) // SHARES, tl.program_id(0) % SHARES
    column = tl.arange(0, BLOCK_N)
    if ACTIVATION is None:
        tile_ptr = tiles_ptr + tl.program_id(1) * 4
        part, first = tl.load(tile_ptr), tl.load(tile_ptr + 1)
        in_memory, width = tl.load(tile_ptr + 2), tl.load(tile_ptr + 3)
    else:
        part, first = 0, tl.program_id(1) * BLOCK_N
        in_memory = PARTS * in_features + first
        width = half - first
    if EVEN_N:
        first, in_memory = tl.multiple_of(first, 16), tl.multiple_of(in_memory, 16)
    start_next(PDL)
    if not AHEAD:
        wait_for_inputs(PDL)
    inside = column < width
    token, index, slots, ranks, count = of_block(list_ptr, block, num_places, BLOCK_M)
    rank = tl.arange(0, RANKS).to(tl.int64)[:, None]
    b_row = memory_ptr + in_memory + rank * rank_stride + column[None, :]
    b, b_up = b_row, b_row
    if AHEAD:
        b = columns_of(
            b_row, share, slots, ranks, count, inside, slot_stride, EVEN_N, RANKS, BLOCK_M
        )
        if ACTIVATION is not None:
            b_up = columns_of(
                b_row + half, share, slots, ranks, count, inside, slot_stride, EVEN_N, RANKS,
                BLOCK_M,
            )  # fmt: skip
        wait_for_inputs(PDL)
    if share > 0 and share >= count:
        return
    # Tokens without an adapter keep their bits; with an activation they are computed like others.
    is_out = (token < num_tokens) & (tl.maximum(index, 0) % SHARES == share)
    if ACTIVATION is None:
        is_out = is_out & (index >= 0)
    is_out = is_out[:, None]
    if not EVEN_N:
        is_out = is_out & inside[None, :]
    at = token.to(tl.int64)[:, None] * out_features + first + column[None, :]
    old = tl.load(product_ptr + at, mask=is_out, other=0.0)
    shrunk = sum_of_splits(made_ptr, part, block, index, num_places, PARTS, SPLIT, RANKS, BLOCK_M)
    result = old.to(tl.float32) + expanded(
        b_row, b, shrunk, index, slots, ranks, count, share, inside, slot_stride,
        AHEAD, EVEN_N, RANKS, SHARES, BLOCK_M, BLOCK_N, STAGES, PRECISION,
    )  # fmt: skip
    if ACTIVATION is None:
        tl.store(out_ptr + at, result.to(old.dtype), mask=is_out)
    else:
        up = tl.load(product_ptr + half + at, mask=is_out, other=0.0).to(tl.float32)
        shrunk = sum_of_splits(made_ptr, 1, block, index, num_places, PARTS, SPLIT, RANKS, BLOCK_M)
        up += expanded(
            b_row + half, b_up, shrunk, index, slots, ranks, count, share, inside, slot_stride,
            AHEAD, EVEN_N, RANKS, SHARES, BLOCK_M, BLOCK_N, STAGES, PRECISION,
        )  # fmt: skip
        # The gate is rounded like a product, and then as in `kernels.activation.triton`.
        gate = result.to(old.dtype).to(tl.float32)
        gated = activated(gate, ACTIVATION) * up.to(old.dtype).to(tl.float32)
        to = token.to(tl.int64)[:, None] * half + first + column[None, :]
        tl.store(out_ptr + to, gated.to(old.dtype), mask=is_out)
