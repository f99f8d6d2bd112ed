"""Latent attention (MLA): the pool has one row per token, from which key and value are computed.

A row is the normed latent, `rank` elements, and a rotated key that all heads share. The absorbed
form multiplies queries by the matrix that would make keys of the latent, so attention reads the
rows as they are: every head attends to one key head of `rank + rope_dim` elements, whose first
`rank` are also the values.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = [
    "LATENT_ATTENTION",
    "LatentAttentionKernels",
    "latent_attention",
    "rotate_and_keep",
]


class LatentAttentionKernels(Protocol):
    """The functions of an implementation of this op."""

    def rotate_and_keep(  # noqa: PLR0913 the op needs all of these
        self,
        q_rope: Tensor,
        kv: Tensor,
        norm: Tensor,
        eps: float,
        cos_sin: Tensor,
        interleaved: bool,
        positions: Tensor,
        slots: Tensor,
        cache: Tensor,
        q: Tensor,
    ) -> None:
        """See `kernels.latent_attention.rotate_and_keep`."""

    def latent_attention(  # noqa: PLR0913 the op needs all of these
        self,
        q: Tensor,
        cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        qo_indptr: Tensor,
        num_decodes: int | None,
        scale: float,
        rank: int,
        invariant: bool,
    ) -> Tensor:
        """See `kernels.latent_attention.latent_attention`."""


LATENT_ATTENTION: Table[LatentAttentionKernels] = Table(
    "latent_attention",
    {
        "reference": Entry("kernels.latent_attention.reference", invariant=True),
        "triton": Entry(
            "kernels.latent_attention.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> LatentAttentionKernels:
    return LATENT_ATTENTION.choose(device_type).kernels


def rotate_and_keep(  # noqa: PLR0913 the op needs all of these
    q_rope: Tensor,
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    q: Tensor,
) -> None:
    """Norm latents, rotate queries and keys, and write the rows to their pages.

    Args:
        q_rope: `[num_tokens, num_heads, rope_dim]`, the part of queries that rotates; elements
            contiguous, tokens and heads at any stride; float16, bfloat16 or float32.
        kv: `[num_tokens, rank + rope_dim]`, latents and keys before norm and rotation; elements
            contiguous, tokens at any stride.
        norm: `[rank]`, the weight of the latents' RMSNorm.
        eps: epsilon of that norm.
        cos_sin: `[max_positions, rope_dim]` float32, cosines then sines, half each.
        interleaved: whether neighbours rotate together; if not, elements of the two halves do.
            Either way the result has the first of each pair in its first half: scores do not change
            when queries and keys are reordered alike.
        positions: `[num_tokens]` int64.
        slots: `[num_tokens]` int64, places of the rows, `page * page_size + offset`; negative for
            none.
        cache: `[num_pages, 1, page_size, row_elements]`, written; a form of `kernels.kv_forms`.
        q: `[num_tokens, num_heads, rank + rope_dim]`, contiguous; its last `rope_dim` elements are
            written.
    """
    _kernels(kv.device.type).rotate_and_keep(
        q_rope, kv, norm, eps, cos_sin, interleaved, positions, slots, cache, q
    )


def latent_attention(  # noqa: PLR0913 the op needs all of these
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    num_decodes: int | None,
    scale: float,
    rank: int,
    invariant: bool = False,
) -> Tensor:
    """Attend from absorbed queries to the rows of their sequences, up to their own positions.

    Args:
        q: `[num_tokens, num_heads, rank + rope_dim]`, contiguous.
        cache: `[num_pages, 1, page_size, rank + rope_dim]`, contiguous, the dtype of `q`.
        page_table: `[num_seqs, max_pages]` int32.
        seq_lens: `[num_seqs]` int32, including this step's tokens.
        qo_indptr: `[num_seqs + 1]` int32, where each sequence's queries start in `q`.
        num_decodes: this many first sequences have exactly one query; `None` if only the device
            knows.
        scale: factor on the scores.
        rank: elements of a row that are also its value.
        invariant: whether a query's result may not depend on the batch.

    Returns:
        `[num_tokens, num_heads * rank]`, the dtype of `q`; rows of padding may hold anything.
    """
    return _kernels(q.device.type).latent_attention(
        q, cache, page_table, seq_lens, qo_indptr, num_decodes, scale, rank, invariant
    )
