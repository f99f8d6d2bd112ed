"""Planned Triton attention; run by `test_triton_interpreted.py` in Triton's interpreter."""

import math

import numpy as np
import pytest
import torch

from kernels.paged_attention import reference, shared_prefix
from kernels.paged_attention.prefix_group import MAX_GROUPS, PrefixGroup
from kernels.paged_attention.shared_prefix import ITEM_FIELDS, KEY_GRAIN, SharedPrefixes
from kernels.paged_attention.triton import AttentionWorkspace, plan_attention, run_attention
from runtime.models.attention.backend import AttentionLayer, StepLimits
from runtime.models.attention.forward_batch import ForwardBatch, KVCache
from runtime.models.attention.triton import TritonAttention

pytestmark = pytest.mark.pairs

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 32, 16


def make_step(seqs, page_size=PAGE, dtype=torch.float32, window_left=-1):
    """Build random caches for `seqs` = [(kv_len, num_queries), ...]; unused slots are NaN."""
    pages_each = [-(-kv_len // page_size) for kv_len, _ in seqs]
    num_pages = sum(pages_each) + 2
    free = torch.randperm(num_pages).tolist()
    caches = [torch.full((num_pages, KV_HEADS, page_size, DIM), math.nan).to(dtype) for _ in "kv"]
    table = torch.full((len(seqs), max(pages_each) + 1), 2**30, dtype=torch.int32)
    for i, (kv_len, _) in enumerate(seqs):
        for j in range(pages_each[i]):
            table[i, j] = page = free.pop()
            held = min(page_size, kv_len - j * page_size)
            for cache in caches:
                cache[page, :, :held] = torch.randn(KV_HEADS, held, DIM).to(dtype)
    num_queries = torch.tensor([0] + [n for _, n in seqs])
    indptr = num_queries.cumsum(0).to(torch.int32)
    q = torch.randn(int(indptr[-1]), HEADS, DIM).to(dtype)
    lens = torch.tensor([kv_len for kv_len, _ in seqs], dtype=torch.int32)
    return q, *caches, table, lens, indptr


def close(got, want, dtype):
    limit = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert (got.double() - want.double()).norm() <= limit * want.double().norm()


@pytest.mark.parametrize("impl", ["triton"])
# Every two of a dtype, a window and a size of blocks meet.
@pytest.mark.parametrize(
    ("dtype", "window_left", "block_rows"),
    [
        (torch.float32, -1, 64),
        (torch.float32, 40, 128),
        (torch.bfloat16, -1, 128),
        (torch.bfloat16, 40, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("seqs", "num_decodes"),
    [
        ([(200, 1), (1, 1), (64, 1), (65, 1), (500, 1)], 5),
        ([(200, 1), (7, 1), (130, 20), (33, 33)], 2),
        ([(70, 70), (150, 3)], 0),
        ([(70, 1), (150, 1)], 0),
    ],
)
def test_a_planned_step(impl, seqs, num_decodes, window_left, dtype, block_rows):
    q, k, v, table, lens, indptr = make_step(seqs, dtype=dtype)
    scale = DIM**-0.5
    want = reference.paged_attention(
        *(x.float() for x in (q, k, v)), table, lens, indptr, scale, window_left, None
    )
    workspace = AttentionWorkspace(8, 200, HEADS, KV_HEADS, DIM, q.device)
    plan = plan_attention(
        workspace, lens, indptr, len(q), num_decodes, window_left, block_rows=block_rows
    )
    assert plan.block_rows == block_rows
    assert (plan.max_decode_items == 0) == (num_decodes == 0)
    assert (plan.max_extend_items == 0) == (num_decodes == len(seqs))
    # Twice: a run must leave its counters as it found them, as layers share them.
    for _ in range(2):
        out = torch.full((len(q), HEADS * DIM), math.nan, dtype=dtype)
        run_attention(plan, q, k, v, table, scale, out)
        close(out, want, dtype)
    assert not workspace.arrived.any()


@pytest.mark.parametrize("impl", ["triton"])
def test_a_replayed_plan_reads_new_lengths_and_padding_is_zero(impl):
    q, k, v, table, lens, indptr = make_step([(300, 1), (40, 1), (90, 1)])
    workspace = AttentionWorkspace(3, 3, HEADS, KV_HEADS, DIM, q.device)
    for lengths in ([300, 40, 90], [10, 33, 0], [1, 40, 64]):
        lens.copy_(torch.tensor(lengths))
        plan = plan_attention(workspace, lens, indptr, 3, 3)
        assert workspace.totals[0] <= plan.max_decode_items
        out = torch.full((3, HEADS * DIM), math.nan)
        run_attention(plan, q, k, v, table, 0.2, out)
        used = torch.tensor(lengths) > 0
        want = reference.paged_attention(q, k, v, table, lens.clamp(min=1), indptr, 0.2, -1, None)
        close(out[used], want[used], torch.float32)
        assert not out[~used].any()


@pytest.mark.parametrize("impl", ["triton"])
def test_work_lists_stay_within_their_bounds(impl):
    generator = torch.Generator().manual_seed(5)
    for _ in range(16):
        count = int(torch.randint(1, 20, (), generator=generator))
        decodes = int(torch.randint(0, count + 1, (), generator=generator))
        queries = torch.randint(1, 90, (count,), generator=generator)
        queries[:decodes] = 1
        lens = (queries + torch.randint(0, 3000, (count,), generator=generator)).to(torch.int32)
        indptr = torch.tensor([0, *queries.cumsum(0).tolist()], dtype=torch.int32)
        tokens = int(indptr[-1])
        workspace = AttentionWorkspace(count, tokens, HEADS, KV_HEADS, DIM, lens.device)
        plan = plan_attention(workspace, lens, indptr, tokens, decodes)
        num_decode, num_extend = workspace.totals.tolist()
        assert num_decode <= min(plan.max_decode_items, len(workspace.decode_items)) or not decodes
        assert num_extend <= min(plan.max_extend_items, len(workspace.extend_items))
        covered = torch.zeros(count, dtype=torch.int64)
        for seq, begin, end, *_ in workspace.decode_items[:num_decode].tolist():
            assert end > begin
            assert begin == covered[seq]
            covered[seq] = end
        assert torch.equal(covered[:decodes], lens[:decodes].long())


def share(table, members, num_pages):
    """Let `members` begin with the first one's pages; what they had there is never read."""
    for seq in members[1:]:
        table[seq, :num_pages] = table[members[0], :num_pages]


GROUPS = {
    "none": [],
    "some": [([0, 2, 3], 20)],
    "two": [([4, 1], 37), ([5, 0, 3], 12)],
    "all": [(list(range(6)), 41)],
}


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize(
    ("groups", "dtype"),
    [
        *((groups, torch.bfloat16) for groups in GROUPS.values()),
        (GROUPS["two"], torch.float32),
        *(pytest.param(GROUPS[n], torch.float32, marks=pytest.mark.long) for n in ("none", "all")),
    ],
    ids=[*GROUPS, "two in float32", "none in float32", "all in float32"],
)
def test_prefixes_that_sequences_share(impl, groups, dtype, monkeypatch):
    """Groups of `PAGE`s; one block of queries holds three members here."""
    monkeypatch.setattr(shared_prefix, "BLOCK_ROWS", 16)
    lengths = [700, 660, 657, 800, 1000, 658]
    q, k, v, table, lens, indptr = make_step([(length, 1) for length in lengths], dtype=dtype)
    for members, num_pages in groups:
        share(table, members, num_pages)
    scale = DIM**-0.5
    want = reference.paged_attention(
        *(x.float() for x in (q, k, v)), table, lens, indptr, scale, -1, None
    )
    workspace = AttentionWorkspace(8, 8, HEADS, KV_HEADS, DIM, q.device)
    prefixes = SharedPrefixes(workspace)
    prefixes.put([PrefixGroup(np.array(members), num * PAGE) for members, num in groups])
    plan = plan_attention(workspace, lens, indptr, 6, 6, prefixes=prefixes)
    for _ in range(2):
        out = torch.full((6, HEADS * DIM), math.nan, dtype=dtype)
        run_attention(plan, q, k, v, table, scale, out)
        close(out, want, dtype)
    assert not workspace.arrived.any()
    # The same keys, no more and no less: each member's own begin where the shared ones end.
    shared = {
        seq: num * PAGE // KEY_GRAIN * KEY_GRAIN for members, num in groups for seq in members
    }
    begins = {}
    for seq, begin, *_ in workspace.decode_items[: int(workspace.totals[0])].tolist():
        begins[seq] = min(begin, begins.get(seq, begin))
    assert begins == {seq: shared.get(seq, 0) for seq in range(6)}


@pytest.mark.parametrize("impl", ["triton"])
def test_a_layer_with_a_window_shares_no_prefix(impl):
    """Its neighbours that see all keys do, in the same step: a window begins elsewhere for each."""
    q, k, v, table, lens, indptr = make_step([(length, 1) for length in (300, 290, 270, 310)])
    members, num_pages = [0, 1, 2, 3], 16
    share(table, members, num_pages)
    nothing = torch.full((4,), -1)
    backend = TritonAttention("cpu", StepLimits(8, 8))
    batch = ForwardBatch(
        input_ids=nothing,
        positions=torch.zeros(4, dtype=torch.int64),
        slots=nothing,
        qo_indptr=indptr,
        seq_lens=lens,
        page_table=table,
        num_decodes=4,
        logits_indices=None,
        kv=[KVCache(k, v), KVCache(k, v)],
        attention=backend,
        shares_prefixes=True,
    )
    no_turn = torch.cat((torch.ones(1, DIM // 2), torch.zeros(1, DIM // 2)), 1)
    layers = [
        AttentionLayer(i, HEADS, KV_HEADS, DIM, DIM**-0.5, no_turn, window_left=window)
        for i, window in enumerate((100, -1))
    ]
    seen = []
    # The first step makes room for the groups, as the capture of a graph does.
    for groups in ([], [PrefixGroup(np.array(members), num_pages * PAGE)]):
        backend.put_prefixes(groups)
        backend.plan(batch)
        for layer in layers:
            qkv = torch.cat((q.flatten(1), torch.zeros(4, 2 * KV_HEADS * DIM)), 1)
            got = backend.run(layer, qkv, batch)
            want = reference.paged_attention(
                q, k, v, table, lens, indptr, layer.scale, layer.window_left, None
            )
            close(got, want, torch.float32)
        plans = [backend._plans[layer.shape, 4] for layer in layers]
        seen.append([None if p.prefixes is None else int(p.prefixes.num_items[0]) for p in plans])
    assert seen[0] == [None, 0]
    assert seen[1][0] is None
    assert seen[1][1] > 0


@pytest.mark.parametrize("impl", ["triton"])
def test_lists_of_shared_prefixes_stay_within_their_bounds(impl):
    generator = np.random.default_rng(3)
    for _ in range(60):
        count = int(generator.integers(2, 200))
        heads = ((14, 2), (32, 8), (6, 6))[count % 3]
        prefixes = SharedPrefixes(AttentionWorkspace(count, count, *heads, 64, torch.device("cpu")))
        order = generator.permutation(count)
        cuts = np.sort(generator.integers(0, count, int(generator.integers(1, MAX_GROUPS))))
        groups = [
            PrefixGroup(members, int(generator.integers(64, 20000)))
            for members in np.split(order, cuts)[1:]
            if len(members)
        ]
        prefixes.put(groups)
        num_items = int(prefixes.num_items[0])
        assert num_items <= prefixes.items_for(count) <= prefixes.max_items
        covered = np.zeros(count, dtype=np.int64)
        items = prefixes.items.view(-1, ITEM_FIELDS)[:num_items].tolist()
        for leader, begin, end, first, size, part, *_ in items:
            assert 0 <= begin < end
            assert begin % KEY_GRAIN == end % KEY_GRAIN == 0
            assert part < prefixes.parts[leader]
            covered[prefixes.members[first : first + size].numpy()] += end - begin
        assert np.array_equal(covered, prefixes.lens[:count].numpy())
        for members, length in groups:
            assert (covered[members] == length // KEY_GRAIN * KEY_GRAIN).all()
