"""Causal attention of a step's queries over the keys and values in pages of the KV cache."""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["PAGED_ATTENTION", "PagedAttentionKernels", "paged_attention"]


class PagedAttentionKernels(Protocol):
    """The functions that each implementation of this op provides."""

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
        """Attend over pages of the KV cache; see `kernels.paged_attention.paged_attention`."""


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
    """Attend from each query to its sequence's keys in the KV cache, up to its own position.

    With `key_ends` a query may also attend to later keys. The queries of a sequence are its last
    `qo_indptr[i + 1] - qo_indptr[i]` tokens, whose keys and values are already in the cache. Decode
    rows (one query) and prefill chunks (many queries, with or without a cached prefix) may be
    mixed.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, float16, bfloat16 or float32, usually a view of
            `qkv`. The heads and elements of a token are contiguous; tokens may have any stride.
        k_cache: `[num_pages, num_kv_heads, page_size, row_elements]`, contiguous. It has the dtype
            of `q`, or on a CPU another form of `kernels.kv_forms`. `num_kv_heads` divides
            `num_heads`. Slots outside the sequences are never used.
        v_cache: the values, with the shape and dtype of `k_cache`.
        page_table: `[num_seqs, max_pages]` int32, the block table: the pages of each sequence in
            order.
        seq_lens: `[num_seqs]` int32, number of keys, including this step's tokens.
        qo_indptr: `[num_seqs + 1]` int32, bounds of each sequence's queries in `q`.
        scale: factor of the scores, usually `head_dim ** -0.5`.
        window_left: most keys before its own position that a query attends to; -1 for all.
        out: `[num_tokens, num_heads * head_dim]`, contiguous, to which the result is written;
            `None` for a new tensor.
        key_ends: `[num_tokens]` int32: each query attends to this many first keys of its sequence.
            The numbers never decrease within a sequence. So the tokens of an image can attend to
            one another in both directions. With `None`, a query attends to the keys up to its own.
            If a sequence has one query, `key_ends` is ignored and the query attends to all keys.
        softcap: if not 0, each scaled score becomes `softcap * tanh(score / softcap)`.
        sinks: `[num_heads]` float32, contiguous, or `None`: an additional score of each head that
            takes part in the softmax but has no value.

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
