"""The Triton kernels of latent attention; run by `test_triton_interpreted.py`."""

import pytest
import torch

from kernels.latent_attention import LATENT_ATTENTION
from kernels.latent_attention.triton import LatentTile, num_splits

# Lengths and new tokens of each sequence; decodes come first.
STEPS = {
    "decodes": [(1, 1), (37, 1), (70, 1)],
    "a prompt": [(21, 21)],
    "mixed": [(40, 1), (5, 1), (33, 9), (18, 18)],
}
PAGE_SIZE = 8


def load(name):
    return LATENT_ATTENTION.load(name)


def operands(step, num_heads, rank, rope_dim, dtype):
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.tensor([length for length, _ in step], dtype=torch.int32)
    counts = torch.tensor([count for _, count in step])
    indptr = torch.cat((torch.zeros(1), counts.cumsum(0))).to(torch.int32)
    width = -(-int(lengths.max()) // PAGE_SIZE)
    table = torch.randperm(width * len(step), generator=generator).view(len(step), width) + 1
    # What no sequence has written is NaN.
    cache = torch.full((int(table.max()) + 1, 1, PAGE_SIZE, rank + rope_dim), torch.nan)
    for row, length in zip(table, lengths.tolist(), strict=True):
        for position in range(length):
            page = row[position // PAGE_SIZE]
            value = torch.randn(rank + rope_dim, generator=generator)
            cache[page, 0, position % PAGE_SIZE] = value
    q = torch.randn(int(indptr[-1]), num_heads, rank + rope_dim, generator=generator)
    return q.to(dtype), cache.to(dtype), table.to(torch.int32), lengths, indptr


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize(
    ("step", "shape", "splits", "dtype"),
    [
        ("decodes", (20, 24, 4), 4, torch.float32),
        ("decodes", (4, 16, 8), 1, torch.bfloat16),
        ("a prompt", (4, 16, 8), 1, torch.float32),
        ("mixed", (4, 24, 4), 1, torch.float32),
        ("mixed", (4, 16, 8), 4, torch.bfloat16),
    ],
    ids=str,
)
def test_attention_is_that_of_the_reference(impl, step, shape, dtype, splits):
    num_heads, rank, rope_dim = shape
    args = operands(STEPS[step], num_heads, rank, rope_dim, dtype)
    num_decodes = sum(count == 1 for _, count in STEPS[step])
    rest = num_decodes, (rank + rope_dim) ** -0.5, rank
    want = load("reference").latent_attention(*args, *rest)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    # Of the interpreter's four multiprocessors.
    tile = LatentTile(1 if step == "decodes" else 2, 16, 4, 1, 8 * splits)
    assert num_splits(8, tile.waves, args[0].device) == 4 * splits
    got = load(impl).latent_attention(*args, *rest, tile=tile if splits > 1 else None)
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    if step == "mixed" and splits > 1:
        # In a graph only the device knows how many sequences have one query.
        got = load(impl).latent_attention(*args, None, *rest[1:])
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("impl", ["triton"])
def test_an_invariant_row_has_the_same_bits_alone(impl):
    step = [(20, 1), (17, 3)]
    q, cache, table, lengths, indptr = operands(step, 4, 16, 8, torch.bfloat16)
    attend = load(impl).latent_attention
    together = attend(q, cache, table, lengths, indptr, 1, 0.2, 16, True)
    for seq in range(len(step)):
        first, end = int(indptr[seq]), int(indptr[seq + 1])
        last = slice(end - 1, end)
        alone = attend(
            q[last].contiguous(),
            cache,
            table[seq : seq + 1].contiguous(),
            lengths[seq : seq + 1],
            torch.tensor([0, 1], dtype=torch.int32),
            1,
            0.2,
            16,
            True,
        )
        assert torch.equal(alone, together[last]), first


@pytest.mark.parametrize("impl", ["triton"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 16, 8), (11, 24, 6)], ids=str)
def test_rows_and_queries_are_those_of_the_reference(impl, shape, dtype, interleaved):
    num_heads, rank, rope_dim = shape
    generator = torch.Generator().manual_seed(rope_dim)

    def noise(*sizes):
        return torch.randn(*sizes, generator=generator)

    num_tokens = 5
    # Both are views into wider rows.
    q_rope = noise(num_tokens, num_heads, rank + rope_dim).to(dtype)[:, :, rank:]
    kv = noise(num_tokens, 7 + rank + rope_dim).to(dtype)[:, 7:]
    norm, table = noise(rank).to(dtype), noise(40, rope_dim)
    positions = torch.tensor([3, 0, 39, 7, 8])
    slots = torch.tensor([9, 25, -1, 16, 10])
    made = []
    for name in ("reference", impl):
        cache = torch.zeros(4, 1, PAGE_SIZE, rank + rope_dim, dtype=dtype)
        q = torch.zeros(num_tokens, num_heads, rank + rope_dim, dtype=dtype)
        load(name).rotate_and_keep(
            q_rope, kv, norm, 1e-6, table, interleaved, positions, slots, cache, q
        )
        made.append((cache, q))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for got, want in zip(made[1], made[0], strict=True):
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
    assert made[0][0].count_nonzero() == 4 * (rank + rope_dim)
