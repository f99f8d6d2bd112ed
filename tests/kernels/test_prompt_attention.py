"""Attention of whole prompts on plain keys, against attention on pages."""

import pytest
import torch

from kernels.paged_attention import reference as paged
from kernels.prompt_attention import PROMPT_ATTENTION, cudnn

HEADS, KV_HEADS, DIM = 6, 2, 32


@pytest.mark.parametrize("impl", [n for n in PROMPT_ATTENTION if n != "cudnn"])
@pytest.mark.parametrize("lengths", [[5], [3, 3, 9, 1], []], ids=str)
def test_equal_to_pages(impl, lengths):
    qkv = torch.randn(sum(lengths), HEADS + 2 * KV_HEADS, DIM)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    got = PROMPT_ATTENTION.load(impl).prompt_attention(q, k, v, lengths, DIM**-0.5)
    # One page holds a whole prompt.
    caches = [torch.zeros(len(lengths), KV_HEADS, 16, DIM) for _ in "kv"]
    start = 0
    for page, length in enumerate(lengths):
        for cache, rows in zip(caches, (k, v), strict=True):
            cache[page, :, :length] = rows[start : start + length].transpose(0, 1)
        start += length
    table = torch.arange(len(lengths), dtype=torch.int32).unsqueeze(1)
    lens = torch.tensor(lengths, dtype=torch.int32)
    indptr = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    want = paged.paged_attention(q, *caches, table, lens, indptr, DIM**-0.5, -1, None)
    assert got.shape == (sum(lengths), HEADS * DIM)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_neighbours_of_a_round_length_share_a_call():
    runs = list(cudnn.runs([4096, 4096, 3000, 3000, 2048]))
    assert runs == [
        (0, 2, 4096),
        (8192, 1, 3000),
        (11192, 1, 3000),
        (14192, 1, 2048),
    ]
