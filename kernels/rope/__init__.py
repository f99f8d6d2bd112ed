"""Rotary embedding, norms of heads, and the write to the paged KV cache, in one pass."""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["ROPE", "RopeKernels", "kv_write", "rope_kv_write"]


class RopeKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def rope_kv_write(  # noqa: PLR0913 one pass over qkv touches all of these
        self,
        qkv: Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos_sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        zero_centered: bool = False,
    ) -> None:
        """Norm and rotate heads, and write keys and values; see `kernels.rope.rope_kv_write`."""

    def kv_write(
        self, k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        """Write keys and values to the KV cache; see `kernels.rope.kv_write`."""


ROPE: Table[RopeKernels] = Table(
    "rope",
    {
        "reference": Entry("kernels.rope.reference"),
        "cpu": Entry("kernels.rope.cpu", probe="kernels.cpu.library:unavailable", invariant=True),
        "triton": Entry(
            "kernels.rope.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cpu": ("cpu",), "cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> RopeKernels:
    return ROPE.choose(device_type).kernels


def rope_kv_write(  # noqa: PLR0913 one pass over qkv touches all of these
    qkv: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> None:
    """Norm and rotate a step's queries and keys in place; write keys and values to the KV cache.

    The rotation pairs element `i` of a head with element `i + head_dim / 2` (rotate-half, NeoX). It
    covers the whole head, is computed in float32 and rounded once.

    Args:
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, contiguous; float16,
            bfloat16 or float32. Queries and keys are overwritten with the result.
        num_heads: query heads.
        num_kv_heads: key (and value) heads.
        head_dim: elements of a head, even.
        cos_sin: `[max_position, head_dim]` float32: in each row `head_dim / 2` cosines, then as
            many sines.
        positions: `[num_tokens]` int64, rows of `cos_sin`.
        slots: `[num_tokens]` int64, the slot mapping: `page * page_size + offset`. A token with
            slot -1 is rotated in `qkv` but not stored.
        k_cache: `[num_pages, num_kv_heads, page_size, row_elements]`, contiguous. It has the dtype
            of `qkv`, or on a CPU another form of `kernels.kv_forms`.
        v_cache: the values, with the shape and dtype of `k_cache`.
        q_norm: `[head_dim]`, weight of an RMS norm of each query head before the rotation, or
            `None`.
        k_norm: `[head_dim]`, weight of an RMS norm of each key head before the rotation, or `None`.
        eps: number that these norms add to the mean square.
        zero_centered: whether these norms multiply by `1 + weight`; see `kernels.norm.rms_norm`.
    """
    _kernels(qkv.device.type).rope_kv_write(
        qkv,
        num_heads,
        num_kv_heads,
        head_dim,
        cos_sin,
        positions,
        slots,
        k_cache,
        v_cache,
        q_norm,
        k_norm,
        eps,
        zero_centered,
    )


def kv_write(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write a step's keys and values to the KV cache, without norm and rotation.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]`, the dtype of the caches. The elements of a head
            are contiguous; tokens and heads may have any stride.
        v: `[num_tokens, num_kv_heads, value_dim]`, with strides as for `k`. `value_dim` may be
            smaller than the heads of `v_cache`, whose other elements become 0.
        slots: `[num_tokens]` int64, the slot mapping: `page * page_size + offset`. A token with
            slot -1 is not stored.
        k_cache: `[num_pages, num_kv_heads, page_size, head_dim]`, contiguous.
        v_cache: the values, with the shape and dtype of `k_cache`.
    """
    _kernels(k.device.type).kv_write(k, v, slots, k_cache, v_cache)
