"""Paged decode attention over a prefix that several sequences share; their queries are one matrix.

Each program takes the queries of several members of a group, for the heads that share a key head,
and attends to one chunk of the group's shared keys, which it reads once for all of them. It stores
its result for `kernels.paged_attention.triton_decode`, which adds it to the result of a sequence's
own keys.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import triton
import triton.language as tl

from kernels.paged_attention.triton_extend import attend_block
from kernels.paged_attention.triton_kept import beside
from kernels.triton_support.launch import wait_for_inputs


@triton.jit
def prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    items_ptr,
    num_items_ptr,
    members_ptr,
    first_slots_ptr,
    partial_ptr,
    lse_ptr,
    q_stride,
    max_pages,
    scale_log2,
    cap_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STAGES: tl.constexpr,
    CAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from one block of members, for one key head, to one chunk of their shared keys."""
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    wait_for_inputs(PDL)
    if item >= tl.load(num_items_ptr):
        return
    item_ptr = items_ptr + item * 8
    leader = tl.load(item_ptr)
    key_begin = tl.load(item_ptr + 1)
    key_end = tl.load(item_ptr + 2)
    first_member = tl.load(item_ptr + 3)
    num_members = tl.load(item_ptr + 4)
    part = tl.load(item_ptr + 5)

    row = tl.arange(0, BLOCK_M)
    place = row // GROUP_ROWS
    head = row % GROUP_ROWS
    column = tl.arange(0, BLOCK_D)
    held = (place < num_members) & (head < GROUP)
    inside = held[:, None] & (column < HEAD_DIM)[None, :]
    seq = tl.load(members_ptr + first_member + place, mask=held, other=0)
    slot = tl.load(first_slots_ptr + seq, mask=held, other=0) + part
    q_at = (seq.to(tl.int64) * q_stride + (kv_head * GROUP + head) * HEAD_DIM)[:, None]
    q = beside(tl.load(q_ptr + q_at + column[None, :], mask=inside, other=0.0), k_ptr)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pages_ptr = page_table_ptr + leader.to(tl.int64) * max_pages
    # Every key is earlier than every query, and chunks are whole blocks, so masks are not needed.
    for start in tl.range(key_begin, key_end, BLOCK_N, num_stages=STAGES):
        acc, best, total = attend_block(
            q, acc, best, total, start, row, row, key_end, -1,
            k_ptr, v_ptr, pages_ptr, kv_head, scale_log2, cap_log2,
            NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, PRECISION, BLOCK_N, BLOCK_D,
            False, False, CAPPED, 0,
        )  # fmt: skip
    result = acc / total[:, None]
    at = (slot * NUM_KV_HEADS + kv_head) * GROUP + head
    tl.store(lse_ptr + at, best + tl.log2(total), mask=held)
    tl.store(
        partial_ptr + at.to(tl.int64)[:, None] * BLOCK_D + column[None, :],
        result,
        mask=held[:, None],
    )
