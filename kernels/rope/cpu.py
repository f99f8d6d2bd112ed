"""Rotary embedding and the cache write through the C++ library; float16 goes to the reference."""

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, library
from kernels.rope import reference

_rope_kv_write = library().hr_rope_kv_write


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
    """Norm, rotate and store; see `kernels.rope.rope_kv_write`."""
    dtype = qkv.dtype
    if dtype not in DTYPES or k_cache.dtype != dtype:
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
