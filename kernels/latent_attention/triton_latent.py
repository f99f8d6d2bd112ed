"""The kernels of `kernels.latent_attention.triton`: rotate and write, attend, combine the parts.

A program of attention holds the queries of all its heads and reads each row once, for scores and
for values. With 16 heads there are 30 operations per byte of the KV cache, so memory limits
decoding. The keys of a sequence are split into enough parts to give every multiprocessor a program.
A second kernel combines the parts.

Source: flash decoding (Dao et al., 2023); one tile for keys and values as in FlashMLA (DeepSeek).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0915 a kernel's parameters, and one loop with all it needs

import triton
import triton.language as tl


@triton.jit
def rotate_and_keep_kernel(
    q_rope_ptr,
    kv_ptr,
    norm_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    cache_ptr,
    q_ptr,
    eps,
    num_heads,
    q_token_stride,
    q_head_stride,
    kv_stride,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    """Write the KV cache's row of one token, or rotate `BLOCK_HEADS` of its query heads."""
    token = tl.program_id(0).to(tl.int64)
    width: tl.constexpr = RANK + 2 * HALF
    angle = tl.arange(0, BLOCK_HALF)
    is_angle = angle < HALF
    first = angle * 2 if INTERLEAVED else angle
    second = first + 1 if INTERLEAVED else angle + HALF
    table = cos_sin_ptr + tl.load(positions_ptr + token) * (2 * HALF)
    cos = tl.load(table + angle, mask=is_angle, other=0.0)
    sin = tl.load(table + HALF + angle, mask=is_angle, other=0.0)
    if tl.program_id(1) == 0:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            kind = cache_ptr.dtype.element_ty
            source, row = kv_ptr + token * kv_stride, cache_ptr + slot * width
            element = tl.arange(0, BLOCK_RANK)
            inside = element < RANK
            latent = tl.load(source + element, mask=inside, other=0.0)
            wide = latent.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps)
            # The latent is rounded before it is multiplied by the weight, as in `kernels.norm`.
            normed = (wide * scale).to(latent.dtype).to(tl.float32)
            normed *= tl.load(norm_ptr + element, mask=inside, other=0.0).to(tl.float32)
            tl.store(row + element, normed.to(latent.dtype).to(kind), mask=inside)
            x = tl.load(source + RANK + first, mask=is_angle, other=0.0)
            y = tl.load(source + RANK + second, mask=is_angle, other=0.0).to(tl.float32)
            one = (x * cos - y * sin).to(x.dtype).to(kind)
            other = (y * cos + x * sin).to(x.dtype).to(kind)
            tl.store(row + RANK + angle, one, mask=is_angle)
            tl.store(row + RANK + HALF + angle, other, mask=is_angle)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        held = (head < num_heads)[:, None] & is_angle[None, :]
        source = q_rope_ptr + token * q_token_stride + head[:, None] * q_head_stride
        x = tl.load(source + first[None, :], mask=held, other=0.0)
        y = tl.load(source + second[None, :], mask=held, other=0.0).to(tl.float32)
        one = x * cos[None, :] - y * sin[None, :]
        other = y * cos[None, :] + x * sin[None, :]
        to = q_ptr + (token * num_heads + head[:, None]) * width + RANK
        tl.store(to + angle[None, :], one.to(x.dtype), mask=held)
        tl.store(to + HALF + angle[None, :], other.to(x.dtype), mask=held)


@triton.jit
def latent_kernel(
    q_ptr,
    cache_ptr,
    page_table_ptr,
    lens_ptr,
    indptr_ptr,
    out_ptr,
    partial_ptr,
    state_ptr,
    scale_log2,
    num_seqs,
    num_heads,
    max_pages,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    SEQS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attend from a block of queries of one sequence to one part of the sequence's rows.

    The block has `TOKENS` queries with `BLOCK_H` heads each. The program finds its block among
    those of all sequences on the device: the host knows only the largest possible number of blocks.
    """
    block = tl.program_id(0)
    split = tl.program_id(2)
    width: tl.constexpr = RANK + ROPE
    if SEQS == 0:
        # Every sequence has one query.
        seq = block
        first_token = block
        end_token = block + 1
    else:
        each = tl.arange(0, SEQS)
        is_seq = each < num_seqs
        starts = tl.load(indptr_ptr + each, mask=is_seq, other=0)
        ends = tl.load(indptr_ptr + each + 1, mask=is_seq, other=0)
        blocks = (ends - starts + TOKENS - 1) // TOKENS
        upto = tl.cumsum(blocks, 0)
        seq = tl.sum((is_seq & (upto <= block)).to(tl.int32), 0)
        before = tl.sum(tl.where(each < seq, blocks, 0), 0)
        is_here = each == seq
        end_token = tl.sum(tl.where(is_here, ends, 0), 0)
        first_token = tl.sum(tl.where(is_here, starts, 0), 0) + (block - before) * TOKENS
    if seq < num_seqs:
        seq_len = tl.load(lens_ptr + seq)
        line = tl.arange(0, TOKENS * BLOCK_H)
        token = first_token + line // BLOCK_H
        head = tl.program_id(1) * BLOCK_H + line % BLOCK_H
        held = (token < end_token) & (head < num_heads)
        # How many keys each query sees.
        seen = seq_len - (end_token - 1 - token)
        last_token = tl.minimum(first_token + TOKENS, end_token) - 1
        key_end = seq_len - (end_token - 1 - last_token)
        latent = tl.arange(0, BLOCK_RANK)
        rope = tl.arange(0, BLOCK_ROPE)
        is_latent, is_rope = latent < RANK, rope < ROPE
        q_row = q_ptr + (token.to(tl.int64) * num_heads + head)[:, None] * width
        q_latent = tl.load(
            q_row + latent[None, :], mask=held[:, None] & is_latent[None, :], other=0.0
        )
        q_rope = tl.load(
            q_row + RANK + rope[None, :], mask=held[:, None] & is_rope[None, :], other=0.0
        )
        per_split = tl.cdiv(tl.cdiv(key_end, BLOCK_N), SPLITS) * BLOCK_N
        start_key = split * per_split
        stop_key = tl.minimum(start_key + per_split, key_end)
        best = tl.full([TOKENS * BLOCK_H], -float("inf"), tl.float32)
        total = tl.zeros([TOKENS * BLOCK_H], tl.float32)
        acc = tl.zeros([TOKENS * BLOCK_H, BLOCK_RANK], tl.float32)
        pages = page_table_ptr + seq.to(tl.int64) * max_pages
        for start in tl.range(start_key, stop_key, BLOCK_N, num_stages=STAGES):
            key = start + tl.arange(0, BLOCK_N)
            inside = key < stop_key
            page = tl.load(pages + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            row = cache_ptr + (page * PAGE_SIZE + key % PAGE_SIZE)[:, None] * width
            rows = tl.load(
                row + latent[None, :], mask=inside[:, None] & is_latent[None, :], other=0.0
            )
            keys = tl.load(
                row + RANK + rope[None, :], mask=inside[:, None] & is_rope[None, :], other=0.0
            )
            scores = tl.dot(q_latent, tl.trans(rows), input_precision=PRECISION)
            scores = tl.dot(q_rope, tl.trans(keys), acc=scores, input_precision=PRECISION)
            is_seen = (key[None, :] < seen[:, None]) & inside[None, :]
            scores = tl.where(is_seen, scores * scale_log2, -float("inf"))
            top = tl.maximum(best, tl.max(scores, 1))
            # A query that has seen no key yet stays at minus infinity.
            shift = tl.where(top == -float("inf"), 0.0, top)
            powers = tl.exp2(scores - shift[:, None])
            factor = tl.exp2(best - shift)
            total = total * factor + tl.sum(powers, 1)
            acc = acc * factor[:, None]
            acc = tl.dot(powers.to(rows.dtype), rows, acc=acc, input_precision=PRECISION)
            best = top
        to = token.to(tl.int64) * num_heads + head
        mask = held[:, None] & is_latent[None, :]
        # The result of a part without keys is zero. A NaN must reach the result.
        is_empty = total == 0.0
        divisor = tl.where(is_empty, 1.0, total)
        acc = acc / divisor[:, None]
        if SPLITS == 1:
            out = out_ptr + to[:, None] * RANK + latent[None, :]
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)
        else:
            place = to * SPLITS + split
            part = partial_ptr + place[:, None] * RANK + latent[None, :]
            tl.store(part, acc, mask=mask)
            state = tl.where(is_empty, -float("inf"), best + tl.log2(divisor))
            tl.store(state_ptr + place, state, mask=held)


@triton.jit
def join_kernel(
    partial_ptr,
    state_ptr,
    out_ptr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Combine the results of all parts of keys for one head of one query."""
    place = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    each = tl.arange(0, BLOCK_SPLITS)
    state = tl.load(state_ptr + place * SPLITS + each, mask=each < SPLITS, other=-float("inf"))
    best = tl.max(state, 0)
    weights = tl.exp2(state - tl.where(best == -float("inf"), 0.0, best))
    total = tl.sum(weights, 0)
    source = partial_ptr + (place * SPLITS + each)[:, None] * RANK + element[None, :]
    mask = (each < SPLITS)[:, None] & (element < RANK)[None, :]
    parts = tl.load(source, mask=mask, other=0.0)
    joined = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    to = out_ptr + place * RANK + element
    tl.store(to, joined.to(out_ptr.dtype.element_ty), mask=element < RANK)
