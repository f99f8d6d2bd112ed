"""The draw, and the ranking of tokens for log-probabilities, after the cut of `triton_rows`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import triton
import triton.language as tl

from kernels.sampling.triton_rows import fixed_mass, key_value, load_scaled, sort_key


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform_bits(seed, position):
    """Return the 24 random bits of `kernels.sampling.draw.uniform`, as int64."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    start = _mix(seed.to(tl.uint64, bitcast=True) + golden)
    mixed = _mix(start + (position + 1).to(tl.uint64, bitcast=True) * golden)
    return (mixed >> 40).to(tl.int64)


@triton.jit
def mass_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    block_max_ptr,
    block_sum_ptr,
    row_max_ptr,
    normaliser_ptr,
    cut_key_ptr,
    mass_ptr,
    ties_ptr,
    stride,
    vocab_size,
    RANKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the probability of one block's tokens above the cut, and count the tokens at the cut."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    if tl.load(temperature_ptr + row) <= 0:
        return
    at_block = row * tl.num_programs(1) + block
    min_p = tl.load(min_p_ptr + row)
    block_max = tl.load(block_max_ptr + at_block)
    row_max = tl.load(row_max_ptr + row)
    normaliser = tl.load(normaliser_ptr + row)
    cut = -2147483648
    if RANKED:
        cut = tl.load(cut_key_ptr + row)
    mass = tl.full([], 0, tl.int64)
    ties = 0
    if (cut == -2147483648) & (min_p <= 0):
        share = tl.load(block_sum_ptr + at_block) * tl.exp(block_max - row_max) / normaliser
        mass = (share * 274877906944.0).to(tl.int64)
    elif (sort_key(block_max) >= cut) & (tl.exp(block_max - row_max) >= min_p):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = load_scaled(logits_ptr, temperature_ptr, row, stride, at, vocab_size, True)
        key = sort_key(x)
        kept = tl.exp(x - row_max) >= min_p
        worth = fixed_mass(x, row_max, normaliser)
        mass = tl.sum(tl.where(kept & (key > cut), worth, 0), axis=0)
        ties = tl.sum((kept & (key == cut)).to(tl.int32), axis=0)
    tl.store(mass_ptr + at_block, mass)
    tl.store(ties_ptr + at_block, ties)


@triton.jit
def draw_kernel(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    seed_ptr,
    position_ptr,
    row_max_ptr,
    normaliser_ptr,
    cut_key_ptr,
    cut_ties_ptr,
    mass_ptr,
    ties_ptr,
    out_ptr,
    stride,
    vocab_size,
    num_blocks,
    RANKED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Draw one row's token by inverse CDF, the first with a large enough cumulative probability."""
    row = tl.program_id(0)
    if tl.load(temperature_ptr + row) <= 0:
        return
    row_max = tl.load(row_max_ptr + row)
    normaliser = tl.load(normaliser_ptr + row)
    block = tl.arange(0, BLOCKS)
    held = block < num_blocks
    mass = tl.load(mass_ptr + row * num_blocks + block, mask=held, other=0)
    cut = -2147483648
    limit = tl.full([], 0, tl.int64)
    each = tl.full([], 0, tl.int64)
    ties_before = tl.zeros([BLOCKS], tl.int64)
    if RANKED:
        cut = tl.load(cut_key_ptr + row)
        limit = tl.load(cut_ties_ptr + row)
        each = fixed_mass(key_value(cut), row_max, normaliser)
        each = tl.where(cut == -2147483648, 0, each)
        ties = tl.load(ties_ptr + row * num_blocks + block, mask=held, other=0).to(tl.int64)
        ties_before = tl.cumsum(ties, axis=0) - ties
        kept = tl.minimum(tl.maximum(limit - ties_before, 0), ties)
        mass += kept * each
    running = tl.cumsum(mass, axis=0)
    total = tl.sum(mass, axis=0)
    bits = uniform_bits(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    target = (bits * total) >> 24
    chosen = tl.sum((held & (running <= target)).to(tl.int32), axis=0)
    chosen = tl.minimum(chosen, num_blocks - 1)
    target -= tl.sum(tl.where(block < chosen, mass, 0), axis=0)
    before = tl.sum(tl.where(block == chosen, ties_before, 0), axis=0)

    at = chosen * BLOCK + tl.arange(0, BLOCK)
    x = load_scaled(logits_ptr, temperature_ptr, row, stride, at, vocab_size, True)
    key = sort_key(x)
    stays = tl.exp(x - row_max) >= tl.load(min_p_ptr + row)
    if RANKED:
        tie = stays & (key == cut)
        rank = before + tl.cumsum(tie.to(tl.int32), axis=0).to(tl.int64)
        stays = stays & ((key > cut) | (tie & (rank <= limit)))
    worth = tl.where(stays, fixed_mass(x, row_max, normaliser), 0)
    token = tl.sum((tl.cumsum(worth, axis=0) <= target).to(tl.int32), axis=0)
    # A block's mass may have been summed in another order, so the last token with mass is the
    # limit.
    last = tl.max(tl.where(worth > 0, tl.arange(0, BLOCK), 0), axis=0)
    if total > 0:
        tl.store(out_ptr + row, chosen * BLOCK + tl.minimum(token, last))


@triton.jit
def count_kernel(
    logits_ptr,
    block_max_ptr,
    cut_key_ptr,
    above_ptr,
    ties_ptr,
    stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Count the tokens of one block that are above the cut, and those exactly at it."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    at_block = row * tl.num_programs(1) + block
    cut = tl.load(cut_key_ptr + row)
    above = 0
    ties = 0
    if sort_key(tl.load(block_max_ptr + at_block)) >= cut:
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = load_scaled(logits_ptr, logits_ptr, row, stride, at, vocab_size, False)
        key = sort_key(x)
        above = tl.sum(((key > cut) & (at < vocab_size)).to(tl.int32), axis=0)
        ties = tl.sum(((key == cut) & (at < vocab_size)).to(tl.int32), axis=0)
    tl.store(above_ptr + at_block, above)
    tl.store(ties_ptr + at_block, ties)


# The kernel is not specialized on `top_k`, which changes with the batch.
@triton.jit(do_not_specialize=["top_k"])
def place_kernel(
    logits_ptr,
    cut_key_ptr,
    cut_ties_ptr,
    above_ptr,
    ties_ptr,
    ranked_ptr,
    stride,
    vocab_size,
    num_blocks,
    top_k,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Store one block's kept tokens, each as one int64 of its sort key and its descending id."""
    row = tl.program_id(0)
    mine = tl.program_id(1)
    block = tl.arange(0, BLOCKS)
    held = block < num_blocks
    above = tl.load(above_ptr + row * num_blocks + block, mask=held, other=0)
    ties = tl.load(ties_ptr + row * num_blocks + block, mask=held, other=0)
    cut = tl.load(cut_key_ptr + row)
    limit = tl.minimum(tl.load(cut_ties_ptr + row), top_k).to(tl.int32)
    ties_before = tl.sum(tl.where(block < mine, ties, 0), axis=0)
    first = tl.sum(tl.where(block < mine, above, 0), axis=0) + tl.minimum(ties_before, limit)
    my_count = tl.sum(tl.where(block == mine, above + ties, 0), axis=0)
    if my_count > 0:
        at = mine * BLOCK + tl.arange(0, BLOCK)
        x = load_scaled(logits_ptr, logits_ptr, row, stride, at, vocab_size, False)
        key = sort_key(x)
        tie = (key == cut) & (at < vocab_size)
        rank = ties_before + tl.cumsum(tie.to(tl.int32), axis=0)
        stays = ((key > cut) & (at < vocab_size)) | (tie & (rank <= limit))
        slot = first + tl.cumsum(stays.to(tl.int32), axis=0) - 1
        entry = (key.to(tl.int64) << 32) | (4294967295 - at.to(tl.int64))
        tl.store(ranked_ptr + row.to(tl.int64) * top_k + slot, entry, mask=stays & (slot < top_k))


@triton.jit(do_not_specialize=["top_k"])
def rank_kernel(
    ranked_ptr,
    row_max_ptr,
    normaliser_ptr,
    values_ptr,
    ids_ptr,
    top_k,
    WIDTH: tl.constexpr,
):
    """Sort one row's kept tokens, and write their log-probabilities and ids."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, WIDTH)
    entry = tl.load(ranked_ptr + row * top_k + slot, mask=slot < top_k, other=-9223372036854775808)
    entry = tl.sort(entry, descending=True)
    x = key_value((entry >> 32).to(tl.int32))
    normaliser = tl.load(normaliser_ptr + row)
    value = x - tl.load(row_max_ptr + row) - tl.log(normaliser)
    value = tl.where(x == float("-inf"), -1e9, tl.maximum(value, -1e9))
    tl.store(values_ptr + row * top_k + slot, value, mask=slot < top_k)
    token = 4294967295 - (entry & 4294967295)
    tl.store(ids_ptr + row * top_k + slot, token, mask=slot < top_k)


# The kernel is not specialized on `count`, nor on the alignment of the ids, which may begin within
# a prompt.
@triton.jit(
    do_not_specialize=["count", "num_ids"], do_not_specialize_on_alignment=["token_ids_ptr"]
)
def gather_kernel(
    logits_ptr, token_ids_ptr, row_max_ptr, normaliser_ptr, out_ptr, count, num_ids, stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the log-probabilities of given tokens, `num_ids` per row."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = at // num_ids
    token = tl.load(token_ids_ptr + at, mask=inside, other=0)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=inside, other=0.0)
    row_max = tl.load(row_max_ptr + row, mask=inside, other=0.0)
    normaliser = tl.load(normaliser_ptr + row, mask=inside, other=1.0)
    value = x - row_max - tl.log(normaliser)
    tl.store(out_ptr + at, tl.where(value > -1e9, value, -1e9), mask=inside)
