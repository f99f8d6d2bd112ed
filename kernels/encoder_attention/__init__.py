"""Bidirectional attention over whole texts, concatenated without padding, for encoders."""

from collections.abc import Sequence
from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["ENCODER_ATTENTION", "EncoderAttentionKernels", "encoder_attention"]


class EncoderAttentionKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def encoder_attention(
        self,
        qkv: Tensor,
        lengths: Sequence[int],
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        window: int,
        is_rounded: bool,
    ) -> Tensor:
        """Attend within each text; see `kernels.encoder_attention.encoder_attention`."""


ENCODER_ATTENTION: Table[EncoderAttentionKernels] = Table(
    "encoder_attention",
    {
        "reference": Entry("kernels.encoder_attention.reference"),
        "cpu": Entry(
            "kernels.encoder_attention.cpu",
            probe="kernels.cpu.library:unavailable",
            invariant=True,
        ),
        "flash": Entry(
            "kernels.encoder_attention.flash",
            probe="kernels.encoder_attention.flash:unavailable",
        ),
    },
    {"cpu": ("cpu",), "cuda": ("flash",)},
)


@cache
def _kernels(device_type: str) -> EncoderAttentionKernels:
    return ENCODER_ATTENTION.choose(device_type).kernels


def encoder_attention(
    qkv: Tensor,
    lengths: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    scale: float,
    window: int = -1,
    is_rounded: bool = False,
) -> Tensor:
    """Attend from each token to all tokens of its own text, or to those within a window.

    Args:
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, queries, then keys, then
            values; float16, bfloat16 or float32, contiguous.
        lengths: number of tokens of each text, in order, each at least 1; their sum is
            `num_tokens`.
        num_heads: query heads.
        num_kv_heads: key (and value) heads, a divisor of `num_heads`.
        scale: factor of the scores, usually `head_dim ** -0.5`.
        window: most tokens that a query attends to on each side of itself; -1 for all.
        is_rounded: whether float32 operands may be rounded to bfloat16 for products.
            Implementations without this support multiply in float32.

    Returns:
        A new `[num_tokens, num_heads * head_dim]` tensor, the dtype of `qkv`.
    """
    kernels = _kernels(qkv.device.type)
    return kernels.encoder_attention(
        qkv, lengths, num_heads, num_kv_heads, scale, window, is_rounded
    )
