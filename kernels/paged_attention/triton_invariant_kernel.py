"""Paged attention whose rows get the same bits in every step: one kernel for decode and extend.

Every query, alone or in a chunk, uses the same block shape and so the same matrix instructions. Its
keys are processed in blocks that start at fixed positions, and blocks form parts that also start at
fixed positions. Each part has a softmax of its own, and the parts are added in order. Either one
program processes all parts of its rows, or each part has a program and the last one adds them. The
sums are the same, so the split does not affect the bits.

The heads that share a key head are packed into the rows of a block (row = token * group + head).

Sources: FlashAttention-2 (Dao, 2023), flash-decoding (Dao, Haziza, Massa, Sizov, 2023); parts of
fixed size instead of a fixed number of parts: "Defeating Nondeterminism in LLM Inference" (He,
2025).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: C901, PLR0913, PLR0915 a kernel's parameters; it is one function

import triton
import triton.language as tl

from kernels.paged_attention.triton_kept import beside, widened
from kernels.paged_attention.triton_scores import soft_capped, with_sink
from kernels.triton_support.launch import wait_for_inputs


@triton.jit
def _add_part(acc, best, total, part_acc, part_best, part_total):
    """Add a part's sums to those of the parts before it."""
    new_best = tl.maximum(best, part_best)
    # `best` and `part_best` are -inf until a row has seen a key.
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    keep = tl.exp2(best - safe)
    take = tl.exp2(part_best - safe)
    acc = acc * keep[:, None] + part_acc * take[:, None]
    return acc, new_best, total * keep + part_total * take


@triton.jit
def _attend(
    q,
    acc,
    best,
    total,
    start,
    query_at,
    last_key,
    first_key,
    kv_len,
    window_left,
    k_ptr,
    v_ptr,
    pages_ptr,
    kv_head,
    scale_log2,
    cap_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Add one block of keys to the running softmax of a part; rows attend up to `last_key`."""
    key = start + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    # Pages before the first visible key of a row may have been freed.
    inside = (key < kv_len) & (key >= first_key)
    if MASKED:
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=inside, other=0)
    else:
        page = tl.load(pages_ptr + key // PAGE_SIZE)
    # Row indices fit 32 bits, but element offsets may not.
    row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + key % PAGE_SIZE
    at = row.to(tl.int64)[:, None] * HEAD_DIM + column[None, :]
    if MASKED:
        mask = inside[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (column < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + at, mask=mask, other=0.0)
        v = tl.load(v_ptr + at, mask=mask, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        k = tl.load(k_ptr + at, mask=(column < HEAD_DIM)[None, :], other=0.0)
        v = tl.load(v_ptr + at, mask=(column < HEAD_DIM)[None, :], other=0.0)
    else:
        k = tl.load(k_ptr + at)
        v = tl.load(v_ptr + at)
    k = widened(k, q)
    v = widened(v, q)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if CAPPED:
        scores = soft_capped(scores * scale_log2, cap_log2) / scale_log2
    if MASKED:
        visible = inside[None, :] & (key[None, :] <= last_key[:, None])
        if WINDOWED:
            visible = visible & (key[None, :] >= query_at[:, None] - window_left)
        scores = tl.where(visible, scores, float("-inf"))
    scores = scores * scale_log2
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    # A row may not see any key of this block, or none so far.
    safe = tl.where(new_best == float("-inf"), 0.0, new_best)
    weight = tl.exp2(scores - safe[:, None])
    rescale = tl.exp2(best - safe)
    total = total * rescale + tl.sum(weight, axis=1)
    acc = tl.dot(weight.to(v.dtype), v, acc=acc * rescale[:, None], input_precision=PRECISION)
    return acc, new_best, total


@triton.jit
def _finish(
    partial_ptr,
    state_ptr,
    out_ptr,
    first_slot,
    num_parts,
    q_row,
    kv_head,
    sinks_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add the stored parts of one query and key head, in order."""
    head = tl.arange(0, GROUP_ROWS)
    column = tl.arange(0, BLOCK_D)
    held = head < GROUP
    best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    acc = tl.zeros([GROUP_ROWS, BLOCK_D], tl.float32)
    for part in tl.range(0, num_parts, num_stages=4):
        row = ((first_slot + part) * NUM_KV_HEADS + kv_head) * GROUP + head
        # The load bypasses the L1 cache, because other multiprocessors wrote these values.
        part_best = tl.load(
            state_ptr + row * 2, mask=held, other=float("-inf"), cache_modifier=".cg"
        )
        part_total = tl.load(state_ptr + row * 2 + 1, mask=held, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(
            partial_ptr + row[:, None] * BLOCK_D + column[None, :],
            mask=held[:, None],
            other=0.0,
            cache_modifier=".cg",
        )
        acc, best, total = _add_part(acc, best, total, part_acc, part_best, part_total)
    if SINKS:
        total = with_sink(total, best, sinks_ptr, kv_head * GROUP + head, held)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at = (q_row * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + head)[:, None] * HEAD_DIM
    tl.store(
        out_ptr + at + column[None, :],
        result.to(out_ptr.dtype.element_ty),
        mask=held[:, None] & (column < HEAD_DIM)[None, :],
    )


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    out_ptr,
    items_ptr,
    totals_ptr,
    key_ends_ptr,
    partial_ptr,
    state_ptr,
    arrived_ptr,
    q_stride,
    max_pages,
    scale_log2,
    window_left,
    cap_log2,
    sinks_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPANS: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from one block of rows, for one key head, to all its keys or to one part of them."""
    wait_for_inputs(PDL)
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(totals_ptr):
        return
    item_ptr = items_ptr + item * 8
    seq = tl.load(item_ptr)
    block = tl.load(item_ptr + 1)
    q_start = tl.load(item_ptr + 2)
    num_queries = tl.load(item_ptr + 3)
    kv_len = tl.load(item_ptr + 4)
    # The only part of keys to process; -1 for all parts.
    only_part = tl.load(item_ptr + 5)
    num_parts = tl.load(item_ptr + 6)
    first_slot = tl.load(item_ptr + 7)

    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, BLOCK_D)
    held = (token < num_queries)[:, None] & (column < HEAD_DIM)[None, :]
    q_row = (q_start + token).to(tl.int64)
    q_at = (q_row * q_stride + head * HEAD_DIM)[:, None] + column[None, :]
    q = beside(tl.load(q_ptr + q_at, mask=held, other=0.0), k_ptr)
    query_at = kv_len - num_queries + token
    last_key = query_at

    first_query = kv_len - num_queries + block * BLOCK_M // GROUP
    last_token = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
    first_key = kv_len * 0
    # Before this key, every row sees every key.
    masked_from = (first_query + 1) // BLOCK_N * BLOCK_N
    if WINDOWED:
        first_key = tl.maximum(first_query - window_left, 0)
        masked_from = 0
    begin = first_key // BLOCK_N * BLOCK_N
    end = kv_len - num_queries + last_token + 1
    if SPANS:
        # The number of visible keys never decreases from one token to the next.
        last_key = tl.load(key_ends_ptr + q_row, mask=token < num_queries, other=0) - 1
        end = tl.load(key_ends_ptr + q_start + last_token)
    slot = first_slot + only_part - begin // PART
    if only_part >= 0:
        begin = tl.maximum(begin, only_part * PART)
        end = tl.minimum(end, (only_part + 1) * PART)
    middle = tl.minimum(tl.maximum(masked_from, begin), end)

    part_best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    part_total = tl.zeros([BLOCK_M], tl.float32)
    part_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    best = part_best
    total = part_total
    acc = part_acc
    pages_ptr = page_table_ptr + seq.to(tl.int64) * max_pages
    if not WINDOWED:
        for start in tl.range(begin, middle, BLOCK_N, num_stages=STAGES):
            if (start % PART == 0) & (start > begin):
                acc, best, total = _add_part(acc, best, total, part_acc, part_best, part_total)
                part_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                part_best = tl.full([BLOCK_M], float("-inf"), tl.float32)
                part_total = tl.zeros([BLOCK_M], tl.float32)
            part_acc, part_best, part_total = _attend(
                q, part_acc, part_best, part_total, start, query_at, last_key, first_key, kv_len,
                window_left,
                k_ptr, v_ptr, pages_ptr, kv_head, scale_log2, cap_log2,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, PRECISION, BLOCK_N, BLOCK_D,
                False, False, CAPPED,
            )  # fmt: skip
    for start in tl.range(middle, end, BLOCK_N, num_stages=STAGES):
        if (start % PART == 0) & (start > begin):
            acc, best, total = _add_part(acc, best, total, part_acc, part_best, part_total)
            part_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            part_best = tl.full([BLOCK_M], float("-inf"), tl.float32)
            part_total = tl.zeros([BLOCK_M], tl.float32)
        part_acc, part_best, part_total = _attend(
            q, part_acc, part_best, part_total, start, query_at, last_key, first_key, kv_len,
            window_left,
            k_ptr, v_ptr, pages_ptr, kv_head, scale_log2, cap_log2,
            NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, PRECISION, BLOCK_N, BLOCK_D,
            True, WINDOWED, CAPPED,
        )  # fmt: skip

    if only_part < 0:
        acc, best, total = _add_part(acc, best, total, part_acc, part_best, part_total)
        if SINKS:
            total = with_sink(total, best, sinks_ptr, head, token < num_queries)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        out_at = (q_row * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
        tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=held)
    else:
        # Only sequences with a single query are split, so its heads are the first rows of the
        # block.
        in_group = tl.arange(0, BLOCK_M)
        stored = (slot * NUM_KV_HEADS + kv_head) * GROUP + in_group
        tl.store(state_ptr + stored * 2, part_best, mask=in_group < GROUP)
        tl.store(state_ptr + stored * 2 + 1, part_total, mask=in_group < GROUP)
        tl.store(
            partial_ptr + stored[:, None] * BLOCK_D + column[None, :],
            part_acc,
            mask=(in_group < GROUP)[:, None],
        )
        # All threads' sums are written before the count is incremented.
        tl.debug_barrier()
        counter_ptr = arrived_ptr + seq * NUM_KV_HEADS + kv_head
        before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if before == num_parts - 1:
            tl.store(counter_ptr, 0)
            _finish(
                partial_ptr,
                state_ptr,
                out_ptr,
                first_slot,
                num_parts,
                q_start.to(tl.int64),
                kv_head,
                sinks_ptr,
                NUM_KV_HEADS,
                GROUP,
                GROUP_ROWS,
                HEAD_DIM,
                BLOCK_D,
                SINKS,
            )
