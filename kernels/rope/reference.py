"""Rotary embedding and the write to the KV cache in plain torch."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.kv_forms import head_elements, kept
from kernels.norm.reference import rms_norm


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
    heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
    query = heads[:, :num_heads]
    key = heads[:, num_heads : num_heads + num_kv_heads]
    value = heads[:, num_heads + num_kv_heads :]
    if q_norm is not None:
        query.copy_(rms_norm(query, q_norm, eps, zero_centered))
    if k_norm is not None:
        key.copy_(rms_norm(key, k_norm, eps, zero_centered))
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    for part in (query, key):
        first, second = part.float().chunk(2, dim=-1)
        part.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    kv_write(key, value, slots, k_cache, v_cache)


def kv_write(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write keys and values to the KV cache; see `kernels.rope.kv_write`."""
    stored = slots >= 0
    pages = slots[stored] // k_cache.shape[2]
    offsets = slots[stored] % k_cache.shape[2]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        whole = pad(rows[stored], (0, head_elements(cache) - rows.shape[2]))
        # Rows are written as bytes, because torch cannot index all 8-bit dtypes.
        to, row = cache.view(torch.uint8), kept(whole, cache.dtype).contiguous()
        to[pages, :, offsets] = row.view(torch.uint8)
