"""Latent attention (MLA): the KV cache has one row per token, which all heads share.

A row serves both keys and values. It consists of the normed latent of `rank` elements and a rotated
key. In the absorbed form, queries are first multiplied by the matrix that would expand the latent
to keys. Attention then reads the rows unchanged: every head attends to one key head of `rank +
rope_dim` elements, whose first `rank` elements are also the values.

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
    """The functions that each implementation of this op provides."""

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
        """Write normed and rotated latents; see `kernels.latent_attention.rotate_and_keep`."""

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
        """Attend to cached latents; see `kernels.latent_attention.latent_attention`."""


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
    """Norm latents, rotate queries and keys, and write the rows to the KV cache.

    Args:
        q_rope: `[num_tokens, num_heads, rope_dim]`, the part of queries that is rotated; float16,
            bfloat16 or float32. Elements are contiguous; tokens and heads may have any stride.
        kv: `[num_tokens, rank + rope_dim]`, latents and keys before norm and rotation. Elements are
            contiguous; tokens may have any stride.
        norm: `[rank]`, the weight of the latents' RMSNorm.
        eps: epsilon of that norm.
        cos_sin: `[max_positions, rope_dim]` float32: in each row `rope_dim / 2` cosines, then as
            many sines.
        interleaved: whether neighboring elements form the pairs that are rotated. If not, a pair is
            element `i` of the first half and element `i` of the second half. In both cases the
            result has the first elements of all pairs in its first half. Scores do not change when
            queries and keys are reordered alike.
        positions: `[num_tokens]` int64.
        slots: `[num_tokens]` int64, slot mapping of the rows: `page * page_size + offset`; a row
            with a negative slot is not written.
        cache: `[num_pages, 1, page_size, row_elements]`, written; in a form of `kernels.kv_forms`.
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
        page_table: `[num_seqs, max_pages]` int32, the block table.
        seq_lens: `[num_seqs]` int32, number of keys, including this step's tokens.
        qo_indptr: `[num_seqs + 1]` int32, bounds of each sequence's queries in `q`.
        num_decodes: number of sequences with exactly one query at the start of the batch; `None` if
            only the device knows it.
        scale: factor of the scores.
        rank: number of elements at the start of a row that are the row's value.
        invariant: whether the bits of a query's result must not depend on the batch.

    Returns:
        `[num_tokens, num_heads * rank]`, the dtype of `q`. Rows of padding may hold anything.
    """
    return _kernels(q.device.type).latent_attention(
        q, cache, page_table, seq_lens, qo_indptr, num_decodes, scale, rank, invariant
    )
