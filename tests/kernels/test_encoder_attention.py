"""Attention of packed texts: every implementation against float64 formulas."""

import pytest
import torch

from kernels.encoder_attention import ENCODER_ATTENTION

pytestmark = pytest.mark.pairs(each=("name",))

IMPLEMENTATIONS = [name for name in ("cpu", "reference") if not ENCODER_ATTENTION.unavailable(name)]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# Shorter than a vector, around a block of keys, past a part of 256 keys and a block of queries.
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 1, 300]
HEADS = [(3, 3, 32), (4, 2, 64), (2, 1, 16), (2, 2, 24)]


def attended64(qkv, lengths, num_heads, num_kv_heads, scale, window):
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    parts = []
    for text in qkv.double().split(lengths):
        sizes = [heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
        q, k, v = (x.view(len(text), -1, head_dim).transpose(0, 1) for x in text.split(sizes, 1))
        k, v = (x.repeat_interleave(num_heads // num_kv_heads, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * scale
        if window >= 0:
            places = torch.arange(len(text))
            scores.masked_fill_((places[:, None] - places).abs() > window, -torch.inf)
        parts.append((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [-1, 0, 9, 64, 1000])
def test_attention_of_packed_texts(name, dtype, heads, window):
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(window + 2)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(sum(LENGTHS), width, generator=generator).to(dtype)
    attend = ENCODER_ATTENTION.load(name).encoder_attention
    for is_rounded in {False, dtype is torch.float32}:
        got = attend(qkv, LENGTHS, num_heads, num_kv_heads, head_dim**-0.5, window, is_rounded)
        assert got.dtype == dtype
        want = attended64(qkv, LENGTHS, num_heads, num_kv_heads, head_dim**-0.5, window)
        error = (got.double() - want).norm() / want.norm()
        assert error < TOLERANCE[torch.bfloat16 if is_rounded else dtype]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_text_attends_to_nothing_of_its_neighbours(name):
    qkv = torch.randn(3 * 40, 3 * 64)
    attend = ENCODER_ATTENTION.load(name).encoder_attention
    alone = attend(qkv[40:80].clone(), [40], 2, 2, 0.1, -1, False)
    qkv[:40], qkv[80:] = torch.nan, torch.inf
    assert torch.equal(attend(qkv, [40, 40, 40], 2, 2, 0.1, -1, False)[40:80], alone)


@pytest.mark.skipif("cpu" not in IMPLEMENTATIONS, reason="no C++ library")
@pytest.mark.parametrize("window", [-1, 20])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_a_text_has_the_same_bits_in_any_batch(window, is_rounded):
    qkv = torch.randn(sum(LENGTHS), 3 * 4 * 32)
    attend = ENCODER_ATTENTION.load("cpu").encoder_attention
    whole = attend(qkv, LENGTHS, 4, 4, 0.2, window, is_rounded)
    alone = [
        attend(text.clone(), [len(text)], 4, 4, 0.2, window, is_rounded)
        for text in qkv.split(LENGTHS)
    ]
    assert torch.equal(torch.cat(alone), whole)
