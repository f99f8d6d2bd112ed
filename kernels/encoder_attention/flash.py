"""Bidirectional attention with torch's flash attention; one launch computes all texts.

Source: FlashAttention-2, arXiv 2307.08691, in the variant for sequences of different lengths.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from kernels.encoder_attention import reference

_MAX_HEAD_DIM = 256


def unavailable() -> str | None:
    """Return why this build of torch cannot run flash attention, or `None` if it can."""
    if not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch has no flash attention"
    return None


def encoder_attention(
    qkv: Tensor,
    lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int,
    is_rounded: bool = False,
) -> Tensor:
    """Attend within each text; see `kernels.encoder_attention.encoder_attention`."""
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    if qkv.dtype == torch.float32 or head_dim % 8 or head_dim > _MAX_HEAD_DIM:
        return reference.encoder_attention(
            qkv, lengths, num_heads, num_kv_heads, scale, window, is_rounded
        )
    q, k, v = qkv.view(len(qkv), -1, head_dim).split((num_heads, num_kv_heads, num_kv_heads), 1)
    bounds, longest = _bounds(tuple(lengths), qkv.device), max(lengths)
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        *(q, k, v, bounds, bounds, longest, longest),
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=window if window >= 0 else None,
        window_size_right=window if window >= 0 else None,
    )[0]
    return attended.reshape(len(qkv), -1)


@lru_cache(maxsize=8)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the bounds of texts, `[num_texts + 1]` int32, cached for all layers of a step."""
    return torch.tensor((0, *lengths), device=device).cumsum(0, dtype=torch.int32)
