"""Attention over whole texts in both directions, as encoders need it, without pages."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from kernels.encoder_attention import encoder_attention
from kernels.rope import rope_kv_write
from runtime.models.attention.backend import AttentionLayer


def attend_packed(
    layer: AttentionLayer, qkv: Tensor, positions: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Rotate one layer's heads and compute attention in each text over all tokens of that text.

    Args:
        layer: the layer's constants; its window counts on both sides of a token.
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, changed in place.
        positions: `[num_tokens]` int64, each token's index in its text.
        lengths: number of tokens of each text.

    Returns:
        `[num_tokens, num_heads * head_dim]`.
    """
    assert layer.cos_sin is not None
    nowhere = _nowhere(layer.num_kv_heads, layer.head_dim, qkv.dtype, qkv.device)
    rope_kv_write(
        qkv,
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.cos_sin,
        positions,
        torch.full_like(positions, -1),
        nowhere,
        nowhere,
        layer.q_norm,
        layer.k_norm,
        layer.eps,
        layer.zero_centered,
    )
    return encoder_attention(
        qkv,
        lengths,
        layer.num_heads,
        layer.num_kv_heads,
        layer.scale,
        layer.window_left,
        layer.is_rounded,
    )


@cache
def _nowhere(heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a dummy page for the kernel, which writes nothing to it as all slots are negative."""
    return torch.empty(1, heads, 1, head_dim, dtype=dtype, device=device)
