"""Rotary embedding and the write to the KV cache in the C++ library; float16 uses the reference."""

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, kept_number, library
from kernels.rope import reference

_rope_kv_write = library().hr_rope_kv_write
_kv_write = library().hr_kv_write


def rope_kv_write(  # noqa: PLR0913 the op's signature
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
    dtype = qkv.dtype
    kept = kept_number(k_cache.dtype, dtype, head_dim)
    if dtype not in DTYPES or kept is None:
        reference.rope_kv_write(
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
        return
    assert qkv.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    assert cos_sin.dtype is torch.float32
    assert positions.dtype is torch.int64
    assert slots.dtype is torch.int64
    _rope_kv_write(
        dtype is torch.bfloat16,
        kept,
        qkv.data_ptr(),
        qkv.shape[0],
        num_heads,
        num_kv_heads,
        head_dim,
        cos_sin.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.shape[2],
        None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(),
        eps,
        zero_centered,
        torch.get_num_threads(),
    )


def kv_write(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write keys and values to the KV cache; see `kernels.rope.kv_write`."""
    if k_cache.dtype != k.dtype:
        reference.kv_write(k, v, slots, k_cache, v_cache)
        return
    assert k.dtype == v.dtype == v_cache.dtype
    assert k.stride(2) == 1
    assert v.stride(2) == 1
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert slots.dtype is torch.int64
    size = k.element_size()
    for rows, cache in ((k, k_cache), (v, v_cache)):
        _kv_write(
            rows.data_ptr(),
            *(stride * size for stride in rows.stride()[:2]),
            rows.shape[2] * size,
            slots.data_ptr(),
            len(slots),
            cache.data_ptr(),
            cache.shape[1],
            cache.shape[2],
            cache.shape[3] * size,
            torch.get_num_threads(),
        )
