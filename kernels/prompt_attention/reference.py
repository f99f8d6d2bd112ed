"""Prompt attention in plain torch: the textbook formula, prompt by prompt, in float32."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

MIN_LENGTH = 1


def supports(q: Tensor) -> bool:
    """Return true: the reference supports every dtype and head size."""
    del q
    return True


def prepare(q: Tensor, num_kv_heads: int, max_length: int, max_tokens: int, scale: float) -> None:
    """Do nothing: the reference needs no work before the first call."""
    del q, num_kv_heads, max_length, max_tokens, scale


def prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """Attend within each prompt; see `PromptAttentionKernels.prompt_attention`."""
    parts = []
    start = 0
    for length in lengths:
        query, key, value = (
            each[start : start + length].transpose(0, 1).float().unsqueeze(0) for each in (q, k, v)
        )
        attended = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        parts.append(attended[0].transpose(0, 1).flatten(1).to(q.dtype))
        start += length
    return torch.cat(parts) if parts else q.new_empty(0, q.shape[1] * q.shape[2])
