"""Attention of packed texts by torch's flash attention, against float64 formulas."""

from __future__ import annotations

import pytest
import torch

from kernels.encoder_attention import ENCODER_ATTENTION
from tests.kernels.test_encoder_attention import LENGTHS, TOLERANCE, attended64
from tests.support.gpu import DEVICE

# The last two are those of vision towers.
HEADS = [(16, 16, 64), (16, 8, 128), (16, 16, 80), (16, 16, 72)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [-1, 0, 64])
def test_attention_of_packed_texts(
    dtype: torch.dtype, heads: tuple[int, int, int], window: int
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    lengths = [*LENGTHS, 1500]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(sum(lengths), width, device=DEVICE).to(dtype)
    chosen = ENCODER_ATTENTION.choose(DEVICE)
    assert chosen.name == "flash"
    scale = head_dim**-0.5
    got = chosen.kernels.encoder_attention(
        qkv, lengths, num_heads, num_kv_heads, scale, window, False
    )
    want = attended64(qkv.cpu(), lengths, num_heads, num_kv_heads, scale, window)
    error = (got.cpu().double() - want).norm() / want.norm()
    assert got.dtype == dtype
    assert error < TOLERANCE[dtype]
