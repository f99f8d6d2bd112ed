"""Paged attention in the C++ library.

float16, and head sizes that are not a multiple of 16, use the reference.
"""

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, kept_number, library
from kernels.paged_attention import reference

_paged_attention = library().hr_paged_attention
_MAX_HEAD_DIM = 576


def supports(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether the library supports this dtype and head size; others use the reference."""
    return dtype in DTYPES and head_dim % 16 == 0 and head_dim <= _MAX_HEAD_DIM


def paged_attention(  # noqa: PLR0913 the op's signature
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
    """Attend in blocks of keys; see `kernels.paged_attention.paged_attention`."""
    dtype = q.dtype
    num_tokens, num_heads, head_dim = q.shape
    kept = kept_number(k_cache.dtype, dtype, head_dim)
    if not supports(dtype, head_dim) or kept is None:
        return reference.paged_attention(
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
    row_stride, head_stride, element_stride = q.stride()
    assert element_stride == 1
    assert head_stride == head_dim
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert page_table.is_contiguous()
    assert page_table.dtype is torch.int32
    assert seq_lens.dtype is torch.int32
    assert qo_indptr.dtype is torch.int32
    assert key_ends is None or (key_ends.dtype is torch.int32 and key_ends.is_contiguous())
    assert sinks is None or (sinks.dtype is torch.float32 and sinks.is_contiguous())
    if out is None:
        out = q.new_empty(num_tokens, num_heads * head_dim)
    _paged_attention(
        dtype is torch.bfloat16,
        kept,
        q.data_ptr(),
        row_stride,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        page_table.data_ptr(),
        page_table.shape[1],
        seq_lens.data_ptr(),
        qo_indptr.data_ptr(),
        seq_lens.shape[0],
        num_heads,
        k_cache.shape[1],
        head_dim,
        k_cache.shape[2],
        scale,
        window_left,
        0 if key_ends is None else key_ends.data_ptr(),
        softcap,
        None if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out
