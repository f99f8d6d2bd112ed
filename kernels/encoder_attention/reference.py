"""Bidirectional attention with torch's own kernels; adjacent texts of one length are batched."""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def encoder_attention(
    qkv: Tensor,
    lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    is_rounded: bool = False,  # noqa: ARG001  # torch multiplies what it is given
) -> Tensor:
    """Attend within each text; see `kernels.encoder_attention.encoder_attention`."""
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    out = qkv.new_empty(qkv.shape[0], num_heads * head_dim)
    sizes = [heads * head_dim for heads in (num_heads, num_kv_heads, num_kv_heads)]
    first = 0
    for length, texts in groupby(lengths):
        count = sum(1 for _ in texts)
        part = slice(first, first + count * length)
        first = part.stop
        q, k, v = (
            x.view(count, length, -1, head_dim).transpose(1, 2)
            for x in qkv[part].split(sizes, dim=1)
        )
        mask = _near(length, window, qkv.device) if 0 <= window < length - 1 else None
        attended = scaled_dot_product_attention(
            q, k, v, mask, scale=scale, enable_gqa=num_heads != num_kv_heads
        )
        out[part] = attended.transpose(1, 2).reshape(count * length, -1)
    return out


def _near(length: int, window: int, device: torch.device) -> Tensor:
    """Return, as `[length, length]` bool, whether each key is within the query's window."""
    places = torch.arange(length, device=device)
    return (places[:, None] - places[None, :]).abs() <= window
