"""Attention of whole texts in both directions, packed without padding: what encoders compute."""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["ENCODER_ATTENTION", "EncoderAttentionKernels", "encoder_attention"]


class EncoderAttentionKernels(Protocol):
    """What an implementation of this op offers."""

    def encoder_attention(
        self, qkv: Tensor, lengths: Sequence[int], num_heads: int, scale: float
    ) -> Tensor:
        """See `kernels.encoder_attention.encoder_attention`."""


ENCODER_ATTENTION: Table[EncoderAttentionKernels] = Table(
    "encoder_attention", {"reference": Entry("kernels.encoder_attention.reference")}, {}
)


@cache
def _kernels(device_type: str) -> EncoderAttentionKernels:
    return ENCODER_ATTENTION.choose(device_type).kernels


def encoder_attention(qkv: Tensor, lengths: Sequence[int], num_heads: int, scale: float) -> Tensor:
    """Attend from each token to all tokens of its own text.

    Args:
        qkv: `[num_tokens, 3 * num_heads * head_dim]`, queries, then keys, then values; float16,
            bfloat16 or float32, contiguous.
        lengths: tokens of each text, in order, each at least 1; they add up to `num_tokens`.
        num_heads: of queries, keys and values alike.
        scale: factor on the scores, usually `head_dim ** -0.5`.

    Returns:
        A new `[num_tokens, num_heads * head_dim]`, the dtype of `qkv`.
    """
    return _kernels(qkv.device.type).encoder_attention(qkv, lengths, num_heads, scale)
