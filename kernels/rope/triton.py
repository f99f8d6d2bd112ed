"""Norms of heads, rotary embedding and the write to the KV cache in Triton: one pass over qkv."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.norm.triton import times_weight
from kernels.paged_attention.triton_kept import narrowed
from kernels.triton_support.launch import launch_options, lets_next_in, start_next, wait_for_inputs

# Elements of qkv per program: enough to hide latency, and few enough to spread one token over
# several programs.
_PROGRAM_ELEMENTS = 1024


@triton.jit
def _rope_kernel(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    ALL_HEADS: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    wait_for_inputs(PDL)
    start_next(PDL and EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    position = tl.load(positions_ptr + token)
    slot = tl.load(slots_ptr + token)

    inside = (head < ALL_HEADS)[:, None] & (column < HALF)[None, :]
    first_ptr = qkv_ptr + (token * ALL_HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    first = tl.load(first_ptr, mask=inside, other=0.0)
    second = tl.load(first_ptr + HALF, mask=inside, other=0.0)
    dtype = first.dtype
    wide_1 = first.to(tl.float32)
    wide_2 = second.to(tl.float32)
    is_query = (head < NUM_HEADS)[:, None]
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_turned = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    is_key = ((head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS))[:, None]

    if HAS_Q_NORM or HAS_K_NORM:
        mean = (tl.sum(wide_1 * wide_1, axis=1) + tl.sum(wide_2 * wide_2, axis=1)) / HEAD_DIM
        scale = tl.rsqrt(mean + eps)[:, None]
        unit_1 = wide_1 * scale
        unit_2 = wide_2 * scale
        # The norm is rounded to the dtype before the rotation, as two separate ops would.
        if HAS_Q_NORM:
            q_1 = tl.load(q_norm_ptr + column, mask=column < HALF, other=0.0)[None, :]
            q_2 = tl.load(q_norm_ptr + HALF + column, mask=column < HALF, other=0.0)[None, :]
            normed_1 = times_weight(unit_1, q_1, ZERO_CENTERED).to(dtype).to(tl.float32)
            normed_2 = times_weight(unit_2, q_2, ZERO_CENTERED).to(dtype).to(tl.float32)
            wide_1 = tl.where(is_query, normed_1, wide_1)
            wide_2 = tl.where(is_query, normed_2, wide_2)
        if HAS_K_NORM:
            k_1 = tl.load(k_norm_ptr + column, mask=column < HALF, other=0.0)[None, :]
            k_2 = tl.load(k_norm_ptr + HALF + column, mask=column < HALF, other=0.0)[None, :]
            normed_1 = times_weight(unit_1, k_1, ZERO_CENTERED).to(dtype).to(tl.float32)
            normed_2 = times_weight(unit_2, k_2, ZERO_CENTERED).to(dtype).to(tl.float32)
            wide_1 = tl.where(is_key, normed_1, wide_1)
            wide_2 = tl.where(is_key, normed_2, wide_2)

    angle_ptr = cos_sin_ptr + position * HEAD_DIM + column
    cos = tl.load(angle_ptr, mask=column < HALF, other=0.0)[None, :]
    sin = tl.load(angle_ptr + HALF, mask=column < HALF, other=0.0)[None, :]
    turned_1 = tl.where(is_value, first, (wide_1 * cos - wide_2 * sin).to(dtype))
    turned_2 = tl.where(is_value, second, (wide_2 * cos + wide_1 * sin).to(dtype))
    tl.store(first_ptr, turned_1, mask=inside & is_turned)
    tl.store(first_ptr + HALF, turned_2, mask=inside & is_turned)

    # For slot -1 nothing is stored; the address on page 0 that is computed for it is not used.
    used = tl.maximum(slot, 0)
    page = used // PAGE_SIZE
    offset = used % PAGE_SIZE
    stored = inside & (slot >= 0)
    k_head = (head - NUM_HEADS)[:, None]
    k_ptr = k_cache_ptr + ((page * NUM_KV_HEADS + k_head) * PAGE_SIZE + offset) * HEAD_DIM
    kept_1, kept_2 = narrowed(turned_1, k_cache_ptr), narrowed(turned_2, k_cache_ptr)
    tl.store(k_ptr + column[None, :], kept_1, mask=stored & is_key)
    tl.store(k_ptr + HALF + column[None, :], kept_2, mask=stored & is_key)
    v_head = k_head - NUM_KV_HEADS
    v_ptr = v_cache_ptr + ((page * NUM_KV_HEADS + v_head) * PAGE_SIZE + offset) * HEAD_DIM
    tl.store(v_ptr + column[None, :], kept_1, mask=stored & is_value)
    tl.store(v_ptr + HALF + column[None, :], kept_2, mask=stored & is_value)


def rope_kv_write(
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
    assert qkv.is_contiguous()
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    assert cos_sin.dtype is torch.float32
    if qkv.shape[0] == 0:
        return
    block_half = triton.next_power_of_2(head_dim // 2)
    all_heads = num_heads + 2 * num_kv_heads
    block_heads = max(1, _PROGRAM_ELEMENTS // (2 * block_half))
    block_heads = min(block_heads, triton.next_power_of_2(all_heads))
    _rope_kernel[(qkv.shape[0], triton.cdiv(all_heads, block_heads))](
        qkv,
        cos_sin,
        positions,
        slots,
        k_cache,
        v_cache,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=k_cache.shape[2],
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        ZERO_CENTERED=zero_centered,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        EARLY=lets_next_in(qkv.shape[0]),
        num_warps=2,
        **launch_options(qkv.device),
    )


@triton.jit
def _write_kernel(
    k_ptr,
    v_ptr,
    slots_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_token,
    k_head,
    v_token,
    v_head,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    start_next(PDL and EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_D)
    slot = tl.load(slots_ptr + token)
    used = tl.maximum(slot, 0)
    inside = (head < NUM_KV_HEADS)[:, None] & (column < HEAD_DIM)[None, :]
    row = (used // PAGE_SIZE * NUM_KV_HEADS + head) * PAGE_SIZE + used % PAGE_SIZE
    to = row[:, None] * HEAD_DIM + column[None, :]
    at = token * k_token + head[:, None] * k_head + column[None, :]
    k = tl.load(k_ptr + at, mask=inside, other=0.0)
    tl.store(k_cache_ptr + to, narrowed(k, k_cache_ptr), mask=inside & (slot >= 0))
    at = token * v_token + head[:, None] * v_head + column[None, :]
    v = tl.load(v_ptr + at, mask=inside & (column < VALUE_DIM)[None, :], other=0.0)
    tl.store(v_cache_ptr + to, narrowed(v, v_cache_ptr), mask=inside & (slot >= 0))


def kv_write(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write keys and values to the KV cache; see `kernels.rope.kv_write`."""
    assert k.stride(2) == v.stride(2) == 1
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    if k.shape[0] == 0:
        return
    _, num_kv_heads, page_size, head_dim = k_cache.shape
    block_dim = triton.next_power_of_2(head_dim)
    block_heads = max(1, _PROGRAM_ELEMENTS // block_dim)
    block_heads = min(block_heads, triton.next_power_of_2(num_kv_heads))
    _write_kernel[(k.shape[0], triton.cdiv(num_kv_heads, block_heads))](
        k,
        v,
        slots,
        k_cache,
        v_cache,
        *k.stride()[:2],
        *v.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=v.shape[2],
        PAGE_SIZE=page_size,
        BLOCK_HEADS=block_heads,
        BLOCK_D=block_dim,
        EARLY=lets_next_in(k.shape[0]),
        num_warps=2,
        **launch_options(k.device),
    )
