"""Batch-invariant Triton attention; run by `test_triton_interpreted.py`."""

import math

import pytest
import torch

from kernels.paged_attention import reference
from kernels.paged_attention import triton_invariant as ours

HEADS, KV_HEADS, DIM, PAGE = 3, 1, 16, 16
SCALE = DIM**-0.5


def make_sequence(length, dtype, page_size=PAGE):
    """One sequence's queries, caches and page table; what is not its own is NaN."""
    num_pages = -(-length // page_size)
    table = torch.randperm(num_pages + 1)[:num_pages].to(torch.int32)
    caches = [
        torch.full((num_pages + 1, KV_HEADS, page_size, DIM), math.nan).to(dtype) for _ in "kv"
    ]
    for cache in caches:
        for j, page in enumerate(table.tolist()):
            held = min(page_size, length - j * page_size)
            cache[page, :, :held] = torch.randn(KV_HEADS, held, DIM).to(dtype)
    q = torch.randn(length, HEADS, DIM).to(dtype)
    return q, *caches, table


def attend(sequence, work, window_left=-1, slots=None):
    """Compute `work` = [(first, count), ...], each a sequence of its own with those queries."""
    q, k, v, table = sequence
    rows = torch.cat([torch.arange(first, first + count) for first, count in work])
    lens = torch.tensor([first + count for first, count in work], dtype=torch.int32)
    counts = torch.tensor([0] + [count for _, count in work])
    indptr = counts.cumsum(0).to(torch.int32)
    workspace = ours.InvariantWorkspace(len(work), len(rows), HEADS, KV_HEADS, DIM, q.device)
    if slots is not None:
        workspace.num_slots = slots
    plan = ours.plan_attention(
        workspace, lens, indptr, len(rows), len(table) * k.shape[2], window_left
    )
    assert 0 < workspace.totals[0] <= min(plan.max_items, len(workspace.items))
    tables = table.expand(len(work), -1).contiguous()
    # Twice: a run must leave its counters as it found them, as layers share them.
    for _ in range(2):
        out = torch.full((len(rows), HEADS * DIM), math.nan, dtype=q.dtype)
        ours.run_attention(plan, q[rows], k, v, tables, SCALE, out)
    assert not workspace.arrived.any()
    want = reference.paged_attention(
        *(x.float() for x in (q[rows], k, v)), tables, lens, indptr, SCALE, window_left, None
    )
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[q.dtype]
    assert (out.double() - want.double()).norm() <= limit * want.double().norm()
    return out


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize(
    ("dtype", "window_left"), [(torch.bfloat16, -1), (torch.float32, -1), (torch.bfloat16, 100)]
)
def test_a_query_gets_the_same_bits_in_every_step(impl, dtype, window_left):
    length = 300
    sequence = make_sequence(length, dtype)
    whole = attend(sequence, [(0, length)], window_left)
    chunks = [(0, 1), (1, 7), (8, 55), (63, 130), (193, 63), (256, 1), (257, 43)]
    assert torch.equal(attend(sequence, chunks, window_left), whole)
    alone = [(position, 1) for position in (0, 63, 64, 255, 256, 299)]
    rows = torch.tensor([position for position, _ in alone])
    # With room for all parts' sums, for some and for none.
    for slots in (None, 2, 0):
        assert torch.equal(attend(sequence, alone, window_left, slots), whole[rows])
    assert torch.equal(attend(sequence, [(299, 1)], window_left), whole[-1:])


@pytest.mark.parametrize("impl", ["triton"])
def test_pages_do_not_show(impl):
    q, k, v, table = make_sequence(300, torch.bfloat16)
    want = attend((q, k, v, table), [(299, 1), (280, 10)])
    order = torch.randperm(len(k))
    moved = torch.empty_like(order)
    moved[order] = torch.arange(len(k))
    again = attend((q, k[order], v[order], moved[table.long()].to(torch.int32)), [(299, 1)])
    assert torch.equal(again, want[:1])


@pytest.mark.parametrize("impl", ["triton"])
def test_a_replayed_plan_reads_new_lengths_and_padding_is_zero(impl):
    q, k, v, table = make_sequence(600, torch.float32)
    lens = torch.tensor([600, 40, 260], dtype=torch.int32)
    indptr = torch.arange(4, dtype=torch.int32)
    tables = table.expand(3, -1).contiguous()
    workspace = ours.InvariantWorkspace(3, 3, HEADS, KV_HEADS, DIM, q.device)
    for lengths in ([600, 40, 260], [10, 513, 0]):
        lens.copy_(torch.tensor(lengths))
        plan = ours.plan_attention(workspace, lens, indptr, 3, 600)
        assert workspace.totals[0] <= plan.max_items
        out = torch.full((3, HEADS * DIM), math.nan)
        ours.run_attention(plan, q[:3], k, v, tables, SCALE, out)
        used = torch.tensor(lengths) > 0
        want = reference.paged_attention(
            q[:3], k, v, tables, lens.clamp(min=1), indptr, SCALE, -1, None
        )
        assert torch.allclose(out[used], want[used], atol=1e-5)
        assert not out[~used].any()
