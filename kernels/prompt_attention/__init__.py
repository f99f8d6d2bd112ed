"""Causal attention of whole prompts among their own tokens, read from the projection's output."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["PROMPT_ATTENTION", "PromptAttentionKernels"]


class PromptAttentionKernels(Protocol):
    """The functions of an implementation of this op."""

    # Shorter prompts, and types that are not listed, are faster with paged attention.
    MIN_LENGTH: int

    def supports(self, q: Tensor) -> bool:
        """Return whether queries of this type and head size can be computed."""

    def prepare(
        self, q: Tensor, num_kv_heads: int, max_length: int, max_tokens: int, scale: float
    ) -> None:
        """Do the first-call work for each shape; call it on the computing thread.

        Args:
            q: as in `prompt_attention`, with any number of tokens.
            num_kv_heads: heads of `k` and `v`, which follow those of `q` in one tensor.
            max_length: most tokens of a prompt.
            max_tokens: most tokens of a call.
            scale: as in `prompt_attention`.
        """

    def prompt_attention(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float
    ) -> Tensor:
        """Attend from each token to its own prompt's tokens up to itself.

        Args:
            q: `[num_tokens, num_heads, head_dim]`, a view into `qkv`: heads and elements
                contiguous, rows at any stride; float16 or bfloat16.
            k: `[num_tokens, num_kv_heads, head_dim]`, likewise.
            v: likewise.
            lengths: tokens of each prompt; they add up to `num_tokens`.
            scale: factor on the scores, usually `head_dim ** -0.5`.

        Returns:
            A new `[num_tokens, num_heads * head_dim]`, the dtype of `q`.
        """


PROMPT_ATTENTION: Table[PromptAttentionKernels] = Table(
    "prompt_attention",
    {
        "reference": Entry("kernels.prompt_attention.reference"),
        "cudnn": Entry(
            "kernels.prompt_attention.cudnn", probe="kernels.prompt_attention.cudnn:unavailable"
        ),
    },
    {"cuda": ("cudnn",)},
)
