"""Statistics of rows, and the cut of top-k and top-p, in Triton without sorting a vocabulary.

Programs read the blocks of a row in parallel, so that one row is as fast as many:

1. `stats_kernel`: maximum and sum of exponentials of each block, and the maxima of its 64
   sub-blocks.
2. `bound_kernel`: the row's maximum and normaliser, and a bound below which no token can survive
   top-k or top-p. For top-k, the k-th largest of the sub-blocks' maxima is such a bound, because it
   is at most the k-th largest logit. For top-p, the maxima above a value have no more mass than all
   logits above it. With min-p, top-p applies to the mass that top-k leaves, so only top-k gives a
   bound.
3. `collect_kernel`: the few logits at or above the bound, from the blocks that have any.
4. `cut_candidates_kernel`: the exact cut among these candidates. If the distribution is so flat
   that there are too many, `cut_row_kernel` searches the row itself with seven pivots per pass.

A cut is a pair: all tokens above `cut_key` are kept, and the first `cut_ties` tokens, by id, that
are equal to it. Logits are compared as integer keys that sort like the floats. Mass is added in
fixed point (2**-38), so its sums do not depend on the order of addition, and a row gets the same
cut in every batch.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import triton
import triton.language as tl

BLOCK = 4096
SUB_BLOCKS = 64
# The most logits at or above the bound that are compared in registers.
CANDIDATES = 2048
# Up to this many candidates are compared pairwise.
FEW_CANDIDATES = 128


@triton.jit
def sort_key(x):
    """Return int32 keys that sort like the floats `x`; 0.0 and -0.0 have equal keys."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_value(key):
    """Return the float of a sort key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def fixed_mass(x, row_max, normaliser):
    """Return the probability of `x` as int64 in units of 2**-38."""
    return (tl.exp(x - row_max) / normaliser * 274877906944.0).to(tl.int64)


@triton.jit
def load_scaled(logits_ptr, temperature_ptr, row, stride, at, vocab_size, SCALED: tl.constexpr):
    """Return logits divided by the temperature; -inf beyond the vocabulary."""
    x = tl.load(
        logits_ptr + row.to(tl.int64) * stride + at, mask=at < vocab_size, other=float("-inf")
    )
    if SCALED:
        temperature = tl.load(temperature_ptr + row)
        # IEEE division: equal logits stay equal, and others keep their order.
        x = tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0) + tl.zeros_like(x))
    return x


@triton.jit
def stats_kernel(
    logits_ptr,
    temperature_ptr,
    block_max_ptr,
    block_sum_ptr,
    block_best_ptr,
    sub_max_ptr,
    count_ptr,
    stride,
    vocab_size,
    SCALED: tl.constexpr,
    RANKED: tl.constexpr,
    BLOCK: tl.constexpr,
    SUBS: tl.constexpr,
):
    """Write the statistics of one block of one row."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    num_blocks = tl.num_programs(1)
    within = tl.arange(0, SUBS)[:, None] * (BLOCK // SUBS) + tl.arange(0, BLOCK // SUBS)[None, :]
    at = block * BLOCK + within
    x = load_scaled(logits_ptr, temperature_ptr, row, stride, at, vocab_size, SCALED)
    sub_max = tl.max(x, axis=1)
    block_max = tl.max(sub_max, axis=0)
    safe = tl.where(block_max == float("-inf"), 0.0, block_max)
    best = tl.min(tl.min(tl.where(x == block_max, at, vocab_size - 1), axis=1), axis=0)
    at_block = row * num_blocks + block
    tl.store(block_max_ptr + at_block, block_max)
    tl.store(block_best_ptr + at_block, best)
    tl.store(block_sum_ptr + at_block, tl.sum(tl.sum(tl.exp(x - safe), axis=1), axis=0))
    if RANKED:
        tl.store(sub_max_ptr + at_block * SUBS + tl.arange(0, SUBS), sub_max)
        if block == 0:
            tl.store(count_ptr + row, 0)


@triton.jit
def _enough(x, mass, limit, use_k, top_k, use_p, wanted):
    """Return whether the values from `limit` on are enough for top-k or for top-p."""
    above = x >= limit
    enough = use_k & (tl.sum(above.to(tl.int32), axis=0) >= top_k)
    return enough | (use_p & (tl.sum(tl.where(above, mass, 0.0), axis=0) >= wanted))


@triton.jit
def bound_kernel(
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    block_max_ptr,
    block_sum_ptr,
    block_best_ptr,
    sub_max_ptr,
    row_max_ptr,
    normaliser_ptr,
    bound_ptr,
    out_ptr,
    num_blocks,
    vocab_size,
    RANKED: tl.constexpr,
    SUBS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Write one row's statistics and best token, and the bound for its rank filters.

    The bound is -(2**31), below every key, if no bound was found, and 2**31 - 1 for rows without
    rank filters.
    """
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    held = block < num_blocks
    block_max = tl.load(block_max_ptr + row * num_blocks + block, mask=held, other=float("-inf"))
    block_sum = tl.load(block_sum_ptr + row * num_blocks + block, mask=held, other=0.0)
    best = tl.load(block_best_ptr + row * num_blocks + block, mask=held, other=vocab_size - 1)
    row_max = tl.max(block_max, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(block_max == row_max, best, vocab_size - 1), axis=0))
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    normaliser = tl.sum(block_sum * tl.exp(block_max - row_max), axis=0)
    tl.store(row_max_ptr + row, row_max)
    tl.store(normaliser_ptr + row, normaliser)
    if RANKED:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        use_k = (top_k > 0) & (top_k < vocab_size)
        of_all = (tl.load(min_p_ptr + row) <= 0) | (top_k <= 0) | (top_k >= vocab_size)
        use_p = (top_p < 1.0) & of_all
        bound = 2147483647
        if (tl.load(temperature_ptr + row) > 0) & (use_k | use_p):
            sub = tl.arange(0, BLOCKS * SUBS)
            sub_max = tl.load(
                sub_max_ptr + row * num_blocks * SUBS + sub,
                mask=sub < num_blocks * SUBS,
                other=float("-inf"),
            )
            mass = tl.exp(sub_max - row_max) / normaliser
            # Slightly more mass than requested, to compensate for the rounding of the sums.
            wanted = top_p * 1.0001 + 1e-6
            # Any value that keeps enough tokens is a bound, so a bisection in floats is precise
            # enough.
            low = row_max - 30.0
            width = tl.full([], 30.0, tl.float32)
            enough = _enough(sub_max, mass, low, use_k, top_k, use_p, wanted)
            bound = tl.where(enough, 0, -2147483648)
            if enough:
                for _ in range(14):
                    width = width * 0.5
                    middle = low + width
                    kept = _enough(sub_max, mass, middle, use_k, top_k, use_p, wanted)
                    low = tl.where(kept, middle, low)
                bound = sort_key(low)
        tl.store(bound_ptr + row, bound)


@triton.jit
def collect_kernel(
    logits_ptr,
    temperature_ptr,
    block_max_ptr,
    bound_ptr,
    count_ptr,
    candidates_ptr,
    stride,
    vocab_size,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Append the keys of one block that reach the row's bound to the candidates, in any order."""
    row = tl.program_id(0)
    block = tl.program_id(1)
    bound = tl.load(bound_ptr + row)
    block_max = tl.load(block_max_ptr + row * tl.num_programs(1) + block)
    if (bound == 2147483647) | (bound == -2147483648) | (sort_key(block_max) < bound):
        return
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = load_scaled(logits_ptr, temperature_ptr, row, stride, at, vocab_size, SCALED)
    key = sort_key(x)
    wanted = ((key >= bound) & (at < vocab_size)).to(tl.int32)
    first = tl.atomic_add(count_ptr + row, tl.sum(wanted, axis=0), sem="relaxed")
    kept_index = first + tl.cumsum(wanted, axis=0) - 1
    tl.store(
        candidates_ptr + row * CANDIDATES + kept_index,
        key,
        mask=(wanted > 0) & (kept_index < CANDIDATES),
    )


@triton.jit
def _search_row(
    logits_ptr,
    temperature_ptr,
    block_max_ptr,
    row,
    stride,
    vocab_size,
    num_blocks,
    row_max,
    normaliser,
    target,
    BY_MASS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the largest key at which the row has reached `target`.

    The tokens at or above the key then number at least `target`, or have at least the mass
    `target`.
    """
    low = tl.full([], -2147483648, tl.int64)
    high = sort_key(row_max).to(tl.int64)
    # Tokens with less than e**-30 of the best token's probability are rarely needed.
    step = tl.full([], 0, tl.int64) + (high - sort_key(row_max - 30.0).to(tl.int64)) // 7
    while low < high:
        pivot = tl.minimum(high - step * (6 - tl.arange(0, 8)), high)
        pivot = tl.where(tl.arange(0, 8) == 7, high + 1, tl.maximum(pivot, low + 1))
        pivot_32 = tl.minimum(pivot, 2147483647).to(tl.int32)
        found = tl.zeros([8, BLOCK], tl.float32)
        lowest = tl.min(pivot_32, axis=0)
        for block in range(num_blocks):
            block_max = tl.load(block_max_ptr + row * num_blocks + block)
            if sort_key(block_max) >= lowest:
                at = block * BLOCK + tl.arange(0, BLOCK)
                x = load_scaled(logits_ptr, temperature_ptr, row, stride, at, vocab_size, SCALED)
                if BY_MASS:
                    worth = tl.exp(x - row_max) / normaliser
                else:
                    worth = tl.where(at < vocab_size, 1.0, 0.0)
                above = sort_key(x)[None, :] >= pivot_32[:, None]
                found += tl.where(above, worth[None, :], 0.0)
        reached = (tl.sum(found, axis=1) >= target) & (tl.arange(0, 8) < 7)
        low = tl.maximum(low, tl.max(tl.where(reached, pivot, -2147483648), axis=0))
        missed = tl.where(reached, 4294967296, pivot)
        high = tl.minimum(high, tl.min(missed, axis=0) - 1)
        step = tl.maximum((high - low) // 7, 1)
    return low.to(tl.int32)


@triton.jit
def _row_above(
    logits_ptr,
    temperature_ptr,
    row,
    stride,
    vocab_size,
    num_blocks,
    row_max,
    normaliser,
    cut,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the number and the fixed-point mass of the tokens above the key `cut`."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for block in range(num_blocks):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = load_scaled(logits_ptr, temperature_ptr, row, stride, at, vocab_size, SCALED)
        above = sort_key(x) > cut
        count += above.to(tl.int32)
        mass += tl.where(above, fixed_mass(x, row_max, normaliser), 0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _ties_that_stay(wanted, above_mass, cut, row_max, normaliser):
    """Return how many tokens at the cut are needed to reach the fixed-point mass `wanted`."""
    each = tl.maximum(fixed_mass(key_value(cut), row_max, normaliser), 1)
    return tl.maximum((wanted - above_mass + each - 1) // each, 0)


@triton.jit
def cut_candidates_kernel(
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    row_max_ptr,
    normaliser_ptr,
    bound_ptr,
    count_ptr,
    candidates_ptr,
    cut_key_ptr,
    cut_ties_ptr,
    vocab_size,
    CANDIDATES: tl.constexpr,
    WIDTH: tl.constexpr,
    AT_LEAST: tl.constexpr,
):
    """Find the cut of a row that has `AT_LEAST` to `WIDTH` candidates.

    Few candidates are compared pairwise; among many, the cut is found by bisection.
    """
    row = tl.program_id(0)
    bound = tl.load(bound_ptr + row)
    found = tl.load(count_ptr + row)
    if bound == 2147483647:
        tl.store(cut_key_ptr + row, -2147483648)
        tl.store(cut_ties_ptr + row, tl.full([], 4611686018427387904, tl.int64))
        return
    if (bound == -2147483648) | (found < AT_LEAST) | (found > WIDTH):
        return
    row_max = tl.load(row_max_ptr + row)
    normaliser = tl.load(normaliser_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    use_k = (top_k > 0) & (top_k < vocab_size)
    slot = tl.arange(0, WIDTH)
    key = tl.load(candidates_ptr + row * CANDIDATES + slot, mask=slot < found, other=-2147483648)
    mass = tl.where(slot < found, fixed_mass(key_value(key), row_max, normaliser), 0)
    if WIDTH <= 256:
        higher = key[None, :] > key[:, None]
        rank = tl.sum(higher.to(tl.int32), axis=1)
        before = tl.sum(tl.where(higher, mass[None, :], 0), axis=1)
    cut = -2147483648
    ties = tl.full([], 4611686018427387904, tl.int64)
    # The mass to which top-p applies: all of it, or with min-p the part that top-k kept.
    whole = tl.full([], 274877906944, tl.int64)
    if use_k:
        if WIDTH <= 256:
            cut = tl.min(tl.where((rank < top_k) & (slot < found), key, 2147483647), axis=0)
        else:
            low = bound.to(tl.int64)
            high = sort_key(row_max).to(tl.int64)
            while low < high:
                middle = (low + high + 1) >> 1
                reached = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), axis=0) >= top_k
                low = tl.where(reached, middle, low)
                high = tl.where(reached, high, middle - 1)
            cut = low.to(tl.int32)
        ties = (top_k - tl.sum((key > cut).to(tl.int32), axis=0)).to(tl.int64)
        if tl.load(min_p_ptr + row) > 0:
            whole = tl.sum(tl.where(key > cut, mass, 0), axis=0)
            whole += ties * fixed_mass(key_value(cut), row_max, normaliser)
    if top_p < 1.0:
        # At least one unit of mass, so that the best token always stays.
        wanted = tl.maximum((whole.to(tl.float32) * top_p).to(tl.int64), 1)
        if WIDTH <= 256:
            p_cut = tl.min(tl.where((before < wanted) & (slot < found), key, 2147483647), axis=0)
        else:
            low = bound.to(tl.int64)
            high = sort_key(row_max).to(tl.int64)
            while low < high:
                middle = (low + high + 1) >> 1
                above = key >= middle.to(tl.int32)
                reached = tl.sum(tl.where(above, mass, 0), axis=0) >= wanted
                low = tl.where(reached, middle, low)
                high = tl.where(reached, high, middle - 1)
            p_cut = low.to(tl.int32)
        above_mass = tl.sum(tl.where(key > p_cut, mass, 0), axis=0)
        p_ties = _ties_that_stay(wanted, above_mass, p_cut, row_max, normaliser)
        fewer = tl.where(p_cut == cut, tl.minimum(ties, p_ties), ties)
        ties = tl.where(p_cut > cut, p_ties, fewer)
        cut = tl.maximum(cut, p_cut)
    tl.store(cut_key_ptr + row, cut)
    tl.store(cut_ties_ptr + row, ties)


@triton.jit
def cut_row_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    block_max_ptr,
    row_max_ptr,
    normaliser_ptr,
    bound_ptr,
    count_ptr,
    cut_key_ptr,
    cut_ties_ptr,
    stride,
    vocab_size,
    num_blocks,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Find the cut of a row that has too many candidates, by a search over the row."""
    row = tl.program_id(0)
    bound = tl.load(bound_ptr + row)
    few = (bound != -2147483648) & (tl.load(count_ptr + row) <= CANDIDATES)
    if (bound == 2147483647) | few:
        return
    row_max = tl.load(row_max_ptr + row)
    normaliser = tl.load(normaliser_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    cut = -2147483648
    ties = tl.full([], 4611686018427387904, tl.int64)
    whole = tl.full([], 274877906944, tl.int64)
    if (top_k > 0) & (top_k < vocab_size):
        cut = _search_row(
            logits_ptr, temperature_ptr, block_max_ptr, row, stride, vocab_size,
            num_blocks, row_max, normaliser, top_k.to(tl.float32), False, SCALED, BLOCK,
        )  # fmt: skip
        above_count, above_mass = _row_above(
            logits_ptr, temperature_ptr, row, stride, vocab_size, num_blocks,
            row_max, normaliser, cut, SCALED, BLOCK,
        )  # fmt: skip
        ties = (top_k - above_count).to(tl.int64)
        if tl.load(min_p_ptr + row) > 0:
            whole = above_mass + ties * fixed_mass(key_value(cut), row_max, normaliser)
    if top_p < 1.0:
        wanted = tl.maximum((whole.to(tl.float32) * top_p).to(tl.int64), 1)
        p_cut = _search_row(
            logits_ptr, temperature_ptr, block_max_ptr, row, stride, vocab_size,
            num_blocks, row_max, normaliser, wanted.to(tl.float32) * 3.637978807091713e-12,
            True, SCALED, BLOCK,
        )  # fmt: skip
        _, above_mass = _row_above(
            logits_ptr, temperature_ptr, row, stride, vocab_size, num_blocks,
            row_max, normaliser, p_cut, SCALED, BLOCK,
        )  # fmt: skip
        p_ties = _ties_that_stay(wanted, above_mass, p_cut, row_max, normaliser)
        fewer = tl.where(p_cut == cut, tl.minimum(ties, p_ties), ties)
        ties = tl.where(p_cut > cut, p_ties, fewer)
        cut = tl.maximum(cut, p_cut)
    tl.store(cut_key_ptr + row, cut)
    tl.store(cut_ties_ptr + row, ties)
