"""Attention over whole texts in the C++ library.

float16, and head sizes that are not a multiple of 16, use the reference.
"""

from array import array
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kernels.cpu.library import library
from kernels.encoder_attention import reference
from kernels.paged_attention.cpu import supports

_encoder_attention = library().hr_encoder_attention
_FLOAT32, _BFLOAT16, _FLOAT32_ROUNDED = range(3)


def encoder_attention(
    qkv: Tensor,
    lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    is_rounded: bool = False,
) -> Tensor:
    """Attend in blocks; see `kernels.encoder_attention.encoder_attention`."""
    num_tokens, width = qkv.shape
    head_dim = width // (num_heads + 2 * num_kv_heads)
    if not supports(qkv.dtype, head_dim):
        return reference.encoder_attention(qkv, lengths, num_heads, num_kv_heads, scale, window)
    assert qkv.is_contiguous()
    bounds = array("i", accumulate(lengths, initial=0))
    assert bounds[-1] == num_tokens
    kind = _FLOAT32_ROUNDED if is_rounded else _FLOAT32
    if qkv.dtype is torch.bfloat16:
        kind = _BFLOAT16
    out = qkv.new_empty(num_tokens, num_heads * head_dim)
    _encoder_attention(
        kind,
        qkv.data_ptr(),
        bounds.buffer_info()[0],
        len(lengths),
        num_heads,
        num_kv_heads,
        head_dim,
        scale,
        window,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
