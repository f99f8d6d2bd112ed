"""Causal attention of a step's queries over the paged key and value caches."""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["PAGED_ATTENTION", "PagedAttentionKernels", "paged_attention"]


class PagedAttentionKernels(Protocol):
    """The functions of an implementation of this op."""

    def paged_attention(  # noqa: PLR0913 the op needs all of these
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        qo_indptr: Tensor,
        scale: float,
        window_left: int,
        out: Tensor | None,
        key_ends: Tensor | None = None,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `kernels.paged_attention.paged_attention`."""


PAGED_ATTENTION: Table[PagedAttentionKernels] = Table(
    "paged_attention",
    {
        "reference": Entry("kernels.paged_attention.reference"),
        "cpu": Entry(
            "kernels.paged_attention.cpu", probe="kernels.cpu.library:unavailable", invariant=True
        ),
        "triton": Entry(
            "kernels.paged_attention.triton", probe="kernels.triton_support.device:unavailable"
        ),
        "triton_invariant": Entry(
            "kernels.paged_attention.triton_invariant",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cpu": ("cpu",), "cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> PagedAttentionKernels:
    return PAGED_ATTENTION.choose(device_type).kernels


def paged_attention(  # noqa: PLR0913 the op needs all of these
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    scale: float,
    window_left: int = -1,
    out: Tensor | None = None,
    key_ends: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from each query to the cached keys of its sequence up to its own position, or beyond.

    The queries of a sequence are its last `qo_indptr[i + 1] - qo_indptr[i]` tokens, whose keys and
    values are already in the cache. Decode rows (one query) and prefill chunks (many, with or
    without a cached prefix) may be mixed.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, usually a view into `qkv`: heads and elements
            contiguous, rows at any stride; float16, bfloat16 or float32.
        k_cache: `[num_pages, num_kv_heads, page_size, row_elements]`, contiguous, the dtype of `q`
            or on a CPU another of `kernels.kv_forms`; `num_kv_heads` divides `num_heads`. Slots
            outside the sequences are never used.
        v_cache: likewise.
        page_table: `[num_seqs, max_pages]` int32, the pages of each sequence in order.
        seq_lens: `[num_seqs]` int32, key length including this step's tokens.
        qo_indptr: `[num_seqs + 1]` int32, where each sequence's queries start in `q`.
        scale: factor on the scores, usually `head_dim ** -0.5`.
        window_left: -1, or how many keys before its own position a query sees.
        out: `[num_tokens, num_heads * head_dim]` to write into, contiguous, or None for a new
            tensor.
        key_ends: `[num_tokens]` int32, how many of its sequence's keys each query may see,
            including its own; it never decreases within a sequence. None: up to its own position.
            It lets the tokens of an image see one another in both directions. A sequence's only
            query sees all keys.
        softcap: if not 0, scaled scores become `softcap * tanh(score / softcap)`.
        sinks: `[num_heads]` float32, contiguous, or None: a score of each head that takes its part
            of the softmax and has no value.

    Returns:
        `out`: `[num_tokens, num_heads * head_dim]`, the dtype of `q`.
    """
    return _kernels(q.device.type).paged_attention(
        q,
        k_cache,
        v_cache,
        page_table,
        seq_lens,
        qo_indptr,
        scale,
        window_left,
        out,
        key_ends,
        softcap,
        sinks,
    )
