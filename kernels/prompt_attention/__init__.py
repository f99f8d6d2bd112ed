"""Causal attention of whole prompts over their own tokens, whose keys are in the qkv tensor."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["PROMPT_ATTENTION", "PromptAttentionKernels"]


class PromptAttentionKernels(Protocol):
    """The functions that each implementation of this op provides."""

    # Shorter prompts are faster with paged attention.
    MIN_LENGTH: int

    def supports(self, q: Tensor) -> bool:
        """Return whether this implementation supports the dtype and head size of `q`."""

    def prepare(
        self, q: Tensor, num_kv_heads: int, max_length: int, max_tokens: int, scale: float
    ) -> None:
        """Do the work that the first call of each shape needs.

        It must be called on the thread that computes.

        Args:
            q: queries as in `prompt_attention`, with any number of tokens.
            num_kv_heads: heads of `k` and of `v`, which follow those of `q` in one tensor.
            max_length: most tokens of a prompt.
            max_tokens: most tokens of a call.
            scale: as in `prompt_attention`.
        """

    def prompt_attention(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float
    ) -> Tensor:
        """Attend from each token to the tokens of its own prompt, up to itself.

        Args:
            q: `[num_tokens, num_heads, head_dim]`, float16 or bfloat16, a view of `qkv`. The heads
                and elements of a token are contiguous; tokens may have any stride.
            k: `[num_tokens, num_kv_heads, head_dim]`, with strides as for `q`.
            v: the values, with the shape and strides of `k`.
            lengths: number of tokens of each prompt; their sum is `num_tokens`.
            scale: factor of the scores, usually `head_dim ** -0.5`.

        Returns:
            A new `[num_tokens, num_heads * head_dim]` tensor, the dtype of `q`.
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
