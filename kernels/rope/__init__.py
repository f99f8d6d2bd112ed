"""Rotary position embedding, head norms and the write into the paged cache, in one pass."""

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
        """See `kernels.rope.rope_kv_write`."""

    def kv_write(
        self, k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        """See `kernels.rope.kv_write`."""


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
    """Norm and rotate a step's queries and keys in place, and store keys and values.

    The rotation is the rotate-half (NeoX) kind over the whole head, computed in float32 and rounded
    once.

    Args:
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, contiguous; float16,
            bfloat16 or float32. Its query and key parts are rewritten in place.
        num_heads: query heads.
        num_kv_heads: key (and value) heads.
        head_dim: elements of a head, even.
        cos_sin: `[max_position, head_dim]` float32: `head_dim / 2` cosines, then the sines.
        positions: `[num_tokens]` int64, rows of `cos_sin`.
        slots: `[num_tokens]` int64, `page * page_size + offset`; -1 stores nothing (the token
            is still rotated in `qkv`).
        k_cache: `[num_pages, num_kv_heads, page_size, row_elements]`, contiguous, the dtype of
            `qkv` or on a CPU another of `kernels.kv_forms`.
        v_cache: likewise.
        q_norm: `[head_dim]` weight of the RMS norm of each query head before the rotation, or
            None.
        k_norm: likewise for the keys.
        eps: added to the mean square by the head norms.
        zero_centered: whether the norms' factors are `1 + weight`, see `kernels.norm.rms_norm`.
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
    """Store a step's keys and values as they are.

    Args:
        k: `[num_tokens, num_kv_heads, head_dim]`, elements contiguous, tokens and heads at any
            stride; the dtype of the caches.
        v: `[num_tokens, num_kv_heads, value_dim]`, likewise; `value_dim` may be smaller than the
            heads of `v_cache`, whose other elements become 0.
        slots: `[num_tokens]` int64, `page * page_size + offset`; -1 stores nothing.
        k_cache: `[num_pages, num_kv_heads, page_size, head_dim]`, contiguous.
        v_cache: likewise.
    """
    _kernels(k.device.type).kv_write(k, v, slots, k_cache, v_cache)
