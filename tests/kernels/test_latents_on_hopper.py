"""The decode kernels of latent attention (MLA) for Hopper, emulated, beside plain torch."""

import importlib.util

import pytest
import torch

from kernels.latent_attention.reference import latent_attention as reference

if importlib.util.find_spec("triton") is None:
    pytest.skip("no triton", allow_module_level=True)

from kernels.latent_attention import gluon_decode, hopper
from kernels.latent_attention.triton import LOG2E
from tests.support.emulated_gluon import EmulatedKernel, Machine, Pointer, Shared

RANK, ROPE = 64, 64
SCALE = 0.05


@pytest.fixture(scope="module")
def emulated():
    names = "latent_decode_kernel", "join_parts_kernel"
    return tuple(EmulatedKernel(gluon_decode, name) for name in names)


def inputs(lengths, num_heads, page_size):
    generator = torch.Generator().manual_seed(len(lengths))
    width = -(-max(lengths) // page_size)
    table = torch.randperm(width * len(lengths), generator=generator) + 1
    table = table.view(len(lengths), width).to(torch.int32)
    # What no sequence has written is NaN.
    cache = torch.full((int(table.max()) + 1, 1, page_size, RANK + ROPE), torch.nan)
    for row, length in zip(table, lengths, strict=True):
        for position in range(length):
            value = torch.randn(RANK + ROPE, generator=generator)
            cache[row[position // page_size], 0, position % page_size] = value
    q = torch.randn(len(lengths), num_heads, RANK + ROPE, generator=generator)
    return q.bfloat16(), cache.bfloat16(), table, torch.tensor(lengths, dtype=torch.int32)


def decoded(kernels, step, tile, num_multiprocessors):
    q, cache, table, lengths = step
    out = torch.full((len(q), q.shape[1] * RANK), torch.nan, dtype=q.dtype)
    scale = SCALE * LOG2E
    hopper.decode(q, cache, table, lengths, scale, RANK, out, tile, kernels, num_multiprocessors)
    return out


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    ("lengths", "num_programs", "num_heads", "page_size"),
    [
        # Each sequence is whole in a program.
        ([1, 64, 65, 128], 1, 16, 16),
        # All programs have two blocks, so they have as many parts as possible.
        ([128] * 6, 6, 4, 16),
        # Programs start within sequences, and some have three of them.
        ([128] * 6, 4, 4, 16),
        ([1, 64, 65, 0, 200, 700], 7, 4, 8),
        # Two groups of heads, pages of one token.
        ([1, 64, 65, 300, 1, 1000, 3], 8, 20, 1),
        # More programs than a join reads at once, and more than there are blocks for.
        ([1500], 20, 4, 16),
        ([300], 64, 16, 16),
    ],
    ids=str,
)
def test_decodes_are_those_of_the_reference(
    emulated, lengths, num_programs, num_heads, page_size, num_stages
):
    tile = hopper.DecodeTile(16, 4, num_stages, num_programs)
    step = inputs(lengths, num_heads, page_size)
    got = decoded(emulated, step, tile, -(-num_heads // tile.heads))
    q, cache, table, seq_lens = step
    indptr = torch.arange(len(lengths) + 1, dtype=torch.int32)
    want = reference(q, cache, table, seq_lens, indptr, len(lengths), SCALE, RANK)
    has_keys = seq_lens > 0
    torch.testing.assert_close(got[has_keys], want[has_keys], atol=2e-2, rtol=2e-2)


def test_a_nan_of_a_key_reaches_the_result_of_its_sequence_only(emulated):
    step = inputs([200, 150], 4, 16)
    _, cache, table, _ = step
    cache[table[0, 9], 0, 5, RANK] = torch.nan
    got = decoded(emulated, step, hopper.TILES[0], 3)
    assert got[0].isnan().all()
    assert got[1].isfinite().all()


def test_data_that_no_kernel_waits_for_are_missing():
    machine = Machine()
    shared, source = Shared(torch.zeros(2)), Pointer(torch.ones(4), torch.tensor([1, 2]))
    machine.copy(shared, source)
    machine.commit()
    assert shared.data.isnan().all()
    machine.wait(1)
    assert shared.data.isnan().all()
    machine.wait(0)
    assert shared.data.tolist() == [1, 1]


def test_only_hopper_uses_these_kernels():
    assert not hopper.can_decode(torch.zeros(2, 4, 576, dtype=torch.bfloat16), 512)


@pytest.mark.parametrize(
    ("seqs", "rank", "rope", "dtype", "fits"),
    [
        (64, 512, 64, torch.bfloat16, True),
        (1024, 512, 64, torch.float16, True),
        (1025, 512, 64, torch.bfloat16, False),
        (64, 256, 64, torch.bfloat16, False),
        (64, 512, 32, torch.bfloat16, False),
        (64, 512, 64, torch.float32, False),
    ],
)
def test_only_compared_sizes_use_these_kernels(seqs, rank, rope, dtype, fits):
    assert hopper.fits(torch.zeros(seqs, 4, rank + rope, dtype=dtype), rank) == fits
