"""Paged attention: every implementation against a literal float64 loop."""

import math
import os

import pytest
import torch
from torch import Tensor

from kernels.paged_attention import PAGED_ATTENTION

pytestmark = pytest.mark.pairs

# Set by test_triton_interpreted.py: Triton's kernels then take tensors of the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
IMPLEMENTATIONS = [
    name
    for name in (*PAGED_ATTENTION.preferred["cpu"], "reference")
    if not PAGED_ATTENTION.unavailable(name)
]
if INTERPRETED:
    IMPLEMENTATIONS += ["triton", "triton_invariant"]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def literal(q, keys, values, scale, window_left, ends, softcap=0.0, sinks=None):
    """q `[n, H, D]`, keys and values `[len, K, D]`, float64; the queries are the last tokens.

    `ends` has for each of them how many keys it sees.
    """
    n, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    out = torch.empty_like(q)
    for i in range(n):
        position = length - n + i
        low = 0 if window_left < 0 else max(0, position - window_left)
        for h in range(heads):
            k = keys[low : ends[i], h * kv_heads // heads]
            v = values[low : ends[i], h * kv_heads // heads]
            scores = k @ q[i, h] * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            missing = 0.0 if sinks is None else sinks[h].double().exp()
            out[i, h] = weights / (weights.sum() + missing) @ v
    return out.flatten(1)


def step(seqs, heads, kv_heads, dim, page_size, dtype, window_left, seed=0, spans=(), **scored):
    """Build the op's arguments for `seqs` = [(prefix, new), ...] and the expected result.

    `spans` = [(sequence, first, end), ...]: tokens of a sequence that see one another. `scored` is
    what the layer does to its scores, a soft cap and sinks.
    """
    g = torch.Generator().manual_seed(seed)
    scale = 1 / math.sqrt(dim)
    total = sum(new for _, new in seqs)
    qkv = torch.randn(total, (heads + 2 * kv_heads) * dim, generator=g).to(dtype)
    q = qkv.view(total, heads + 2 * kv_heads, dim)[:, :heads]
    pages_each = [-(-(prefix + new) // page_size) for prefix, new in seqs]
    num_pages = sum(pages_each) + 3
    caches = [torch.full((num_pages, kv_heads, page_size, dim), math.nan).to(dtype) for _ in "kv"]
    free = torch.randperm(num_pages, generator=g).tolist()
    table = torch.full((len(seqs), max(pages_each, default=0) + 1), 2**30, dtype=torch.int32)
    expected, key_ends, start = [], [], 0
    for i, (prefix, new) in enumerate(seqs):
        length = prefix + new
        kv = [torch.randn(length, kv_heads, dim, generator=g).to(dtype) for _ in "kv"]
        pages = [free.pop() for _ in range(pages_each[i])]
        table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for at in range(length):
            # What no query can see any more may hold anything.
            hidden = window_left >= 0 and at < prefix - window_left
            for cache, rows in zip(caches, kv, strict=True):
                if not hidden:
                    cache[pages[at // page_size], :, at % page_size] = rows[at]
        ends = list(range(1, length + 1))
        for _, first, end in (span for span in spans if span[0] == i):
            ends[first:end] = [end] * (end - first)
        key_ends += ends[prefix:]
        query, *kv = (x.double() for x in (q[start : start + new], *kv))
        expected.append(literal(query, *kv, scale, window_left, ends[prefix:], **scored))
        start += new
    lens = torch.tensor([p + n for p, n in seqs], dtype=torch.int32)
    counts = torch.tensor([0] + [n for _, n in seqs], dtype=torch.int64)
    indptr = counts.cumsum(0).to(torch.int32)
    want = torch.cat(expected) if expected else torch.empty(0, heads * dim).double()
    args = (q, *caches, table, lens, indptr, scale, window_left)
    return (args, torch.tensor(key_ends, dtype=torch.int32), want) if spans else (args, want)


def check(name: str, args, want: Tensor, key_ends: Tensor | None = None, **scored) -> None:
    q = args[0]
    out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), math.nan, dtype=q.dtype)
    before = [x.clone() for x in args[:3]]
    got = PAGED_ATTENTION.load(name).paged_attention(*args, out, key_ends, **scored)
    assert got is out
    assert got.dtype == q.dtype
    for x, y in zip(args[:3], before, strict=True):
        assert torch.equal(x.nan_to_num(), y.nan_to_num()), "an input was changed"
    if want.numel():
        error = (got.double() - want).norm() / want.norm()
        assert error < TOLERANCE[q.dtype], f"relative error {error:.2e}"


MIXES = {
    "decode one": [(0, 1)],
    "decode": [(130, 1), (0, 1), (17, 1), (63, 1), (64, 1)],
    "long decode": [(1100, 1)],
    "prefill": [(0, 70), (0, 1), (0, 5)],
    "chunks": [(300, 9), (64, 65), (1, 2)],
    "mixed": [(31, 1), (0, 33), (100, 20), (257, 1)],
    "empty sequence": [(0, 3), (0, 0), (5, 0), (16, 1)],
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_mixes(name, dtype, mix):
    args, want = step(MIXES[mix], 4, 2, 32, 16, dtype, -1)
    check(name, args, want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_head_dims(name, dtype, dim):
    args, want = step([(40, 1), (3, 30)], 2, 1, dim, 16, dtype, -1)
    check(name, args, want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 128])
def test_page_sizes(name, page_size):
    args, want = step([(70, 1), (33, 30), (0, 4)], 4, 2, 32, page_size, torch.bfloat16, -1)
    check(name, args, want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_groups(name, group, kv_heads):
    args, want = step([(300, 1), (10, 13)], group * kv_heads, kv_heads, 32, 16, torch.float32, -1)
    check(name, args, want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window_left", [0, 1, 15, 64, 1000])
def test_windows(name, dtype, window_left):
    mix = [(200, 1), (90, 40), (0, 150), (0, 1), (700, 1)]
    args, want = step(mix, 2, 1, 32, 16, dtype, window_left)
    check(name, args, want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scored", ["softcap", "sinks", "both, with a window"])
def test_soft_caps_and_sinks(name, dtype, scored):
    # Long rows are split, alone and in parts; scores of about 1 are bent by a cap of 0.7.
    mix = [(1100, 1), (40, 1), (0, 33), (90, 20), (0, 1)]
    how = {"softcap": 0.0 if scored == "sinks" else 0.7}
    if scored != "softcap":
        how["sinks"] = torch.tensor([2.0, -1.0, 0.5, 6.0])
    window_left = 50 if "window" in scored else -1
    args, want = step(mix, 4, 2, 32, 16, dtype, window_left, **how)
    check(name, args, want, **how)


# (sequence, first, end): across blocks of queries and of keys, at both ends of a chunk, begun in an
# earlier step, side by side, of one token.
SPANS = [(0, 25, 86), (2, 5, 30), (2, 30, 31), (2, 31, 65), (3, 66, 85), (4, 0, 8), (4, 9, 11)]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "window_left"),
    [(torch.float32, -1), (torch.float32, 15), (torch.bfloat16, 0), (torch.bfloat16, 100)],
    ids=str,
)
def test_tokens_that_see_to_the_end_of_their_span(name, dtype, window_left):
    mix = [(0, 90), (40, 1), (0, 65), (70, 15), (0, 12), (0, 3)]
    args, key_ends, want = step(mix, 3, 1, 32, 16, dtype, window_left, spans=SPANS)
    check(name, args, want, key_ends)


@pytest.mark.skipif("cpu" not in IMPLEMENTATIONS, reason="no C++ library")
@pytest.mark.parametrize("window_left", [-1, 100])
def test_cpu_row_of_a_span_has_the_same_bits_in_any_chunk(window_left):
    run = PAGED_ATTENTION.load("cpu").paged_attention
    spans = [(0, 40, 340), (0, 341, 500)]
    args, ends, _ = step([(0, 600)], 6, 1, 64, 16, torch.float32, window_left, spans=spans)
    q, k, v, table, _, _, scale, window = args
    whole = run(*args, None, ends)
    start = 0
    for count in (40, 300, 1, 259):
        lens = torch.tensor([start + count], dtype=torch.int32)
        indptr = torch.tensor([0, count], dtype=torch.int32)
        part = slice(start, start + count)
        got = run(q[part], k, v, table, lens, indptr, scale, window, None, ends[part].contiguous())
        assert torch.equal(got, whole[part])
        start += count


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_float16_and_odd_head_dims_work(name):
    check(name, *step([(40, 1), (3, 9)], 4, 2, 64, 16, torch.float16, -1))
    check(name, *step([(40, 1), (3, 9)], 4, 2, 40, 16, torch.float32, -1))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_no_tokens(name):
    args, want = step([], 4, 2, 32, 16, torch.float32, -1)
    check(name, args, want)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_large_scores_do_not_overflow(name):
    args, _want = step([(100, 1), (0, 40)], 2, 1, 32, 16, torch.float32, -1)
    q, *rest = args
    q.mul_(1000)
    got = PAGED_ATTENTION.load(name).paged_attention(q, *rest, None)
    assert got.isfinite().all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_nan_stays_in_its_sequence(name):
    args, want = step([(20, 1), (20, 1)], 2, 1, 32, 16, torch.float32, -1)
    args[1][args[3][0, 0]] = math.nan
    got = PAGED_ATTENTION.load(name).paged_attention(*args, None)
    assert got[0].isnan().all()
    assert (got[1].double() - want[1]).norm() < 1e-4


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_counts(name, threads):
    args, want = step([(1400, 1), (600, 1), (5, 1)], 3, 1, 32, 16, torch.float32, -1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(name, args, want)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif("cpu" not in IMPLEMENTATIONS, reason="no C++ library")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window_left", [-1, 100])
def test_cpu_row_has_the_same_bits_in_any_chunk_or_batch(dtype, window_left):
    length = 1100
    run = PAGED_ATTENTION.load("cpu").paged_attention
    args, _ = step([(0, length)], 6, 1, 64, 16, dtype, window_left)
    q, k, v, table, _, _, scale, window = args
    whole = run(*args, None)
    for counts in ([1] * 5, [64, 300, 736], [1, 1, 500, 598], [length - 1, 1]):
        start = 0 if sum(counts) == length else length - sum(counts)
        for count in counts:
            lens = torch.tensor([start + count], dtype=torch.int32)
            indptr = torch.tensor([0, count], dtype=torch.int32)
            part = q[start : start + count]
            got = run(part, k, v, table, lens, indptr, scale, window, None)
            assert torch.equal(got, whole[start : start + count])
            start += count
    rows = torch.arange(length - 24, length)
    lens = (rows + 1).to(torch.int32)
    indptr = torch.arange(25, dtype=torch.int32)
    tables = table.expand(24, -1).contiguous()
    assert torch.equal(run(q[rows], k, v, tables, lens, indptr, scale, window, None), whole[rows])
