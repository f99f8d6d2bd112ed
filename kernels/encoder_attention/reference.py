"""Attention in both directions by torch's own kernels, neighbours of one length together."""

from collections.abc import Sequence
from itertools import groupby

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def encoder_attention(qkv: Tensor, lengths: Sequence[int], num_heads: int, scale: float) -> Tensor:
    """Attend within each text; see `kernels.encoder_attention.encoder_attention`."""
    num_tokens, width = qkv.shape[0], qkv.shape[1] // 3
    out = qkv.new_empty(num_tokens, width)
    first = 0
    for length, texts in groupby(lengths):
        count = sum(1 for _ in texts)
        part = slice(first, first + count * length)
        first = part.stop
        q, k, v = (
            x.view(count, length, num_heads, width // num_heads).transpose(1, 2)
            for x in qkv[part].split(width, dim=1)
        )
        attended = scaled_dot_product_attention(q, k, v, scale=scale)
        out[part] = attended.transpose(1, 2).reshape(count * length, width)
    return out
