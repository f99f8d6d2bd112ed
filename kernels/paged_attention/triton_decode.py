"""Paged decode attention: one query per sequence, whose keys are split over the device.

The heads that share a key head are the rows of the matrix products, so keys and values are read
once. Each program attends to one chunk of one sequence's keys. If a sequence has several chunks,
the program that finishes last adds their results, which saves a launch per layer.

Source: flash-decoding (Dao, Haziza, Massa, Sizov, 2023); the reduction by the last program is that
of stream-K (Osama et al., 2023).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0915, C901 a kernel's parameters; it is one function, with its variants

import triton
import triton.language as tl

from kernels.paged_attention.triton_kept import beside, halves, widened
from kernels.paged_attention.triton_scores import soft_capped, with_sink
from kernels.triton_support.launch import start_next, wait_for_inputs


@triton.jit
def _add_parts(
    partial_ptr,
    lse_ptr,
    out_row_ptr,
    first_item,
    num_parts,
    kv_head,
    sinks_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Combine the chunks of one sequence and key head, `PARTS` at a time."""
    head = tl.arange(0, GROUP_ROWS)
    column = tl.arange(0, BLOCK_D)
    best = tl.full([GROUP_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_ROWS], tl.float32)
    for first in range(0, num_parts, 32):
        part = first + tl.arange(0, 32)
        row = ((first_item + part) * NUM_KV_HEADS + kv_head)[:, None] * GROUP + head[None, :]
        inside = (part < num_parts)[:, None] & (head < GROUP)[None, :]
        # The load bypasses the L1 cache, because other multiprocessors wrote these values.
        lse = tl.load(lse_ptr + row, mask=inside, other=float("-inf"), cache_modifier=".cg")
        new_best = tl.maximum(best, tl.max(lse, axis=0))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        total = total * tl.exp2(best - safe) + tl.sum(tl.exp2(lse - safe[None, :]), axis=0)
        best = new_best
    safe = tl.where(best == float("-inf"), 0.0, best)
    acc = tl.zeros([GROUP_ROWS, BLOCK_D], tl.float32)
    # The weights of the chunks are known at this point, so the loads of their results are
    # independent.
    for first in tl.range(0, num_parts, PARTS, num_stages=3):
        part = first + tl.arange(0, PARTS)
        row = ((first_item + part) * NUM_KV_HEADS + kv_head)[:, None] * GROUP + head[None, :]
        inside = (part < num_parts)[:, None] & (head < GROUP)[None, :]
        lse = tl.load(lse_ptr + row, mask=inside, other=float("-inf"), cache_modifier=".cg")
        value = tl.load(
            partial_ptr + row[:, :, None] * BLOCK_D + column[None, None, :],
            mask=inside[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        weight = tl.exp2(lse - safe[None, :])
        acc += tl.sum(weight[:, :, None] * value, axis=0)
    if SINKS:
        total = with_sink(total, best, sinks_ptr, kv_head * GROUP + head, head < GROUP)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_row_ptr + head[:, None] * HEAD_DIM + column[None, :],
        result.to(out_row_ptr.dtype.element_ty),
        mask=(head < GROUP)[:, None] & (column < HEAD_DIM)[None, :],
    )


@triton.jit
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    out_ptr,
    items_ptr,
    totals_ptr,
    partial_ptr,
    lse_ptr,
    arrived_ptr,
    q_stride,
    max_pages,
    scale_log2,
    cap_log2,
    sinks_ptr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    SHARED: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from one sequence's query, for one key head, to one chunk of keys.

    With `SHARED`, some sequences have a common prefix, and other programs have already stored the
    results of its chunks.
    """
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    wait_for_inputs(PDL)
    start_next(PDL and EARLY)
    num_items = tl.load(totals_ptr)
    # There is memory for an item of each program, so these loads do not wait for the one above.
    item_ptr = items_ptr + item * 8
    seq = tl.load(item_ptr)
    key_begin = tl.load(item_ptr + 1)
    key_end = tl.load(item_ptr + 2)
    num_parts = tl.load(item_ptr + 4)
    q_row = tl.load(item_ptr + 5).to(tl.int64)
    if item >= num_items:
        return
    slot, own_parts = item, num_parts
    if SHARED:
        slot = tl.load(item_ptr + 6)
        own_parts = tl.load(item_ptr + 7)

    # A 16-bit number holds two 8-bit keys or values; see `halves`. A product needs 16 columns.
    IS_8_BIT: tl.constexpr = k_ptr.dtype.element_ty.primitive_bitwidth == 8
    PACKED: tl.constexpr = 2 if IS_8_BIT and BLOCK_D >= 32 else 1
    WIDTH: tl.constexpr = BLOCK_D // PACKED
    head = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    held = (head < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    q_base = q_row * q_stride + (kv_head * GROUP + head)[:, None] * HEAD_DIM
    place = tl.arange(0, WIDTH)
    if PACKED == 2:
        k_ptr16 = k_ptr.to(tl.pointer_type(tl.int16))
        v_ptr16 = v_ptr.to(tl.pointer_type(tl.int16))
        q_at = q_base + 2 * place[None, :]
        in_head = (head < GROUP)[:, None] & (2 * place < HEAD_DIM)[None, :]
        q = beside(tl.load(q_ptr + q_at, mask=in_head, other=0.0), k_ptr)
        q_odd = beside(tl.load(q_ptr + q_at + 1, mask=in_head, other=0.0), k_ptr)
        acc_odd = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    else:
        q = beside(tl.load(q_ptr + q_base + column[None, :], mask=held, other=0.0), k_ptr)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    pages_ptr = page_table_ptr + seq.to(tl.int64) * max_pages
    for start in tl.range(key_begin, key_end, BLOCK_N, num_stages=STAGES):
        key = start + tl.arange(0, BLOCK_N)
        inside = key < key_end
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=inside, other=0)
        # Row indices fit 32 bits, but element offsets may not.
        row = (page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + key % PAGE_SIZE
        at = row.to(tl.int64)[:, None] * (HEAD_DIM // PACKED) + place[None, :]
        mask = inside[:, None]
        if HEAD_DIM != BLOCK_D:
            mask = mask & (place < HEAD_DIM // PACKED)[None, :]
        if PACKED == 2:
            k, k_odd = halves(tl.load(k_ptr16 + at, mask=mask, other=0), k_ptr, q)
            scores = tl.dot(q_odd, tl.trans(k_odd), input_precision=PRECISION)
            scores = tl.dot(q, tl.trans(k), acc=scores, input_precision=PRECISION)
            scores *= scale_log2
        else:
            k = widened(tl.load(k_ptr + at, mask=mask, other=0.0), q)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if CAPPED:
            scores = soft_capped(scores, cap_log2)
        scores = tl.where(inside[None, :], scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        weight = tl.exp2(scores - new_best[:, None])
        rescale = tl.exp2(best - new_best)
        total = total * rescale + tl.sum(weight, axis=1)
        if PACKED == 2:
            v, v_odd = halves(tl.load(v_ptr16 + at, mask=mask, other=0), v_ptr, q)
            weight = weight.to(v.dtype)
            acc_odd *= rescale[:, None]
            acc_odd = tl.dot(weight, v_odd, acc=acc_odd, input_precision=PRECISION)
            acc *= rescale[:, None]
            acc = tl.dot(weight, v, acc=acc, input_precision=PRECISION)
        else:
            v = widened(tl.load(v_ptr + at, mask=mask, other=0.0), q)
            weight = weight.to(v.dtype)
            acc = tl.dot(weight, v, acc=acc * rescale[:, None], input_precision=PRECISION)
        best = new_best
    if PACKED == 2:
        acc = tl.interleave(acc, acc_odd)

    # If a sequence is split, its sink is added once, when the chunks are combined.
    if SINKS and num_parts == 1:
        total = with_sink(total, best, sinks_ptr, kv_head * GROUP + head, head < GROUP)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_row_ptr = out_ptr + (q_row * NUM_KV_HEADS + kv_head) * GROUP * HEAD_DIM
    if num_parts == 1:
        tl.store(
            out_row_ptr + head[:, None] * HEAD_DIM + column[None, :],
            result.to(out_ptr.dtype.element_ty),
            mask=held,
        )
    else:
        row = (slot * NUM_KV_HEADS + kv_head) * GROUP + head
        tl.store(lse_ptr + row, best + tl.log2(total), mask=head < GROUP)
        tl.store(
            partial_ptr + row[:, None] * BLOCK_D + column[None, :],
            result,
            mask=(head < GROUP)[:, None],
        )
        # All threads' parts are written before the count is incremented.
        tl.debug_barrier()
        counter_ptr = arrived_ptr + seq * NUM_KV_HEADS + kv_head
        before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        if before == own_parts - 1:
            tl.store(counter_ptr, 0)
            _add_parts(
                partial_ptr,
                lse_ptr,
                out_row_ptr,
                tl.load(item_ptr + 3),
                num_parts,
                kv_head,
                sinks_ptr,
                NUM_KV_HEADS,
                GROUP,
                GROUP_ROWS,
                HEAD_DIM,
                BLOCK_D,
                PARTS,
                SINKS,
            )
