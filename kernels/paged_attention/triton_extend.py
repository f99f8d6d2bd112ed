"""Paged extend attention: a sequence's many queries attend to its prefix and to one another.

The heads that share a key head are packed into the rows of one block (row = token * group + head).
A key is therefore read once for all of them, and short chunks still fill the rows of the tensor
cores.

Source: FlashAttention-2 (Dao, 2023).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import triton
import triton.language as tl

from kernels.paged_attention.triton_kept import beside, widened
from kernels.paged_attention.triton_scores import soft_capped, with_sink
from kernels.triton_support.launch import wait_for_inputs


@triton.jit
def attend_block(
    q,
    acc,
    best,
    total,
    start,
    query_at,
    last_key,
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
    first_key,
):
    """Add one block of keys to the running softmax; a row attends up to `last_key`."""
    key = start + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_D)
    if MASKED:
        inside = (key < kv_len) & (key >= first_key)
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
    new_best = tl.maximum(best, tl.max(scores, axis=1) * scale_log2)
    # A row may not see any key of this block, or none so far.
    safe = tl.where(new_best == float("-inf"), 0.0, new_best) if MASKED else new_best
    weight = tl.exp2(scores * scale_log2 - safe[:, None])
    rescale = tl.exp2(best - safe)
    total = total * rescale + tl.sum(weight, axis=1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weight.to(v.dtype), v, acc=acc, input_precision=PRECISION)
    return acc, new_best, total


@triton.jit
def extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    out_ptr,
    items_ptr,
    totals_ptr,
    key_ends_ptr,
    q_stride,
    max_pages,
    scale_log2,
    window_left,
    cap_log2,
    sinks_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPANS: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from one block of rows, for one key head, to all visible keys."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    wait_for_inputs(PDL)
    if item >= tl.load(totals_ptr + 1):
        return
    item_ptr = items_ptr + item * 8
    seq = tl.load(item_ptr)
    block = tl.load(item_ptr + 1)
    q_start = tl.load(item_ptr + 2)
    num_queries = tl.load(item_ptr + 3)
    kv_len = tl.load(item_ptr + 4)

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

    first_token = block * BLOCK_M // GROUP
    last_token = tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, num_queries - 1)
    first_query = kv_len - num_queries + first_token
    key_end = kv_len - num_queries + last_token + 1
    if SPANS:
        # The number of visible keys never decreases from one token to the next.
        last_key = tl.load(key_ends_ptr + q_row, mask=token < num_queries, other=0) - 1
        key_end = tl.load(key_ends_ptr + q_start + last_token)
    if WINDOWED:
        first_key = tl.maximum(first_query - window_left, 0)
        masked_from = first_key
    else:
        first_key = 0
        # Before this key, every row sees every key.
        masked_from = (first_query + 1) // BLOCK_N * BLOCK_N

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pages_ptr = page_table_ptr + seq.to(tl.int64) * max_pages
    if not WINDOWED:
        for start in tl.range(0, masked_from, BLOCK_N, num_stages=STAGES):
            acc, best, total = attend_block(
                q, acc, best, total, start, query_at, last_key, kv_len, window_left,
                k_ptr, v_ptr, pages_ptr, kv_head, scale_log2, cap_log2,
                NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, PRECISION, BLOCK_N, BLOCK_D,
                False, False, CAPPED, first_key,
            )  # fmt: skip
    for start in tl.range(masked_from, key_end, BLOCK_N, num_stages=STAGES):
        acc, best, total = attend_block(
            q, acc, best, total, start, query_at, last_key, kv_len, window_left,
            k_ptr, v_ptr, pages_ptr, kv_head, scale_log2, cap_log2,
            NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, PRECISION, BLOCK_N, BLOCK_D,
            True, WINDOWED, CAPPED, first_key,
        )  # fmt: skip

    if SINKS:
        total = with_sink(total, best, sinks_ptr, head, token < num_queries)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = (q_row * (NUM_KV_HEADS * GROUP) + head)[:, None] * HEAD_DIM + column[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=held)
