"""Paged attention in Triton: keys are split for decode rows, queries are split for prefill chunks.

The runtime's attention back end holds an `AttentionWorkspace`, calls `plan_attention` once a step
and `run_attention` once a layer. `paged_attention`, the op of the kernel table, does both at once.

Microseconds of a layer on an H200, in bfloat16, with 32/8 heads of 128 and pages of 16
(`benchmarks/results/h200/attention_cuts.json`):

    decode, 64 x 1024 tokens          70
    decode, 256 x 768 tokens         193
    decode, 1 x 4096 tokens           16
    prefill, 4096 tokens, no prefix  372 (369 TFLOP/s)

torch's cuDNN attention computes that prefill in 258 microseconds, if keys are in a plain tensor
(`prompt_attention.json` in the same folder). This module reads keys only from pages. A step of
prompts without a cached prefix, whose keys are still in `qkv`, should use cuDNN.
"""

# ruff: noqa: PLR0913 the op's signature

import math

import torch
import triton
from torch import Tensor

from kernels.kv_forms import FLOATS_OF_8_BITS
from kernels.paged_attention.triton_decode import decode_kernel
from kernels.paged_attention.triton_extend import extend_kernel
from kernels.paged_attention.triton_plan import (
    AttentionPlan,
    AttentionWorkspace,
    plan_attention,
)
from kernels.paged_attention.triton_prefix import prefix_kernel
from kernels.paged_attention.triton_scores import score_options
from kernels.paged_attention.triton_tiles import Tile, decode_tile, extend_tile, prefix_tile
from kernels.triton_support.launch import launch_options, lets_next_in

__all__ = [
    "AttentionPlan",
    "AttentionWorkspace",
    "Tile",
    "paged_attention",
    "plan_attention",
    "run_attention",
]


def run_attention(
    plan: AttentionPlan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    scale: float,
    out: Tensor,
    key_ends: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tiles: tuple[Tile | None, Tile | None] = (None, None),
) -> None:
    """Compute attention in one layer of a planned step; allocates nothing and never blocks.

    Args:
        plan: the plan for this step and this layer's `window_left`.
        q: `[num_tokens, num_heads, head_dim]`. The heads and elements of a token are contiguous;
            tokens may have any stride.
        k_cache: `[num_pages, num_kv_heads, page_size, head_dim]`, contiguous, the dtype of `q` or
            an 8-bit float.
        v_cache: the values, with the shape and dtype of `k_cache`.
        page_table: `[num_seqs, max_pages]` int32, the block table, rows contiguous.
        scale: factor of the scores.
        out: `[num_tokens, num_heads * head_dim]`, contiguous, overwritten. Rows outside the plan's
            sequences (padding after `qo_indptr[-1]`) are unchanged.
        key_ends: number of keys that each query attends to; see
            `kernels.paged_attention.paged_attention`.
        softcap: cap of the scaled scores; 0 for none.
        sinks: an additional score of each head in the softmax; `None` for none.
        tiles: the tiles of decode and extend, for tuning; `None` for the measured choice.
    """
    workspace = plan.workspace
    _, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[1], k_cache.shape[2]
    assert (num_heads, num_kv_heads, head_dim) == (
        workspace.num_heads,
        workspace.num_kv_heads,
        workspace.head_dim,
    )
    assert q.stride(1) == head_dim
    assert q.stride(2) == 1
    assert q.dtype == out.dtype
    assert k_cache.dtype == v_cache.dtype
    assert k_cache.dtype in (q.dtype, *FLOATS_OF_8_BITS)
    assert page_table.dtype is torch.int32
    assert page_table.stride(1) == 1
    assert out.is_contiguous()
    group = num_heads // num_kv_heads
    block_dim = max(16, triton.next_power_of_2(head_dim))
    group_rows = triton.next_power_of_2(group)
    scale_log2 = scale * math.log2(math.e)
    cap_log2 = softcap * math.log2(math.e)
    scored = score_options(softcap, sinks)
    given_sinks = workspace.partial_lse if sinks is None else sinks
    assert given_sinks.dtype is torch.float32
    # The compile-time parameters of every kernel.
    layout = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAGE_SIZE": page_size,
        "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
        "BLOCK_D": block_dim,
    }
    prefixes = plan.prefixes
    partials = workspace if prefixes is None else prefixes
    if prefixes is not None:
        tile = prefix_tile(q.dtype, block_dim, workspace.room)
        prefix_kernel[(num_kv_heads, prefixes.items_for(len(q)))](
            q,
            k_cache,
            v_cache,
            page_table,
            prefixes.items,
            prefixes.num_items,
            prefixes.members,
            prefixes.first_slots,
            prefixes.partials,
            prefixes.partial_lse,
            q.stride(0),
            page_table.stride(0),
            scale_log2,
            cap_log2,
            **layout,
            CAPPED=scored["CAPPED"],
            GROUP_ROWS=group_rows,
            BLOCK_M=prefixes.block_rows,
            BLOCK_N=tile.block_n,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            **launch_options(q.device),
        )
    if plan.max_decode_items:
        tile = tiles[0] or decode_tile(q.dtype, block_dim, plan.decode_load, k_cache.itemsize)
        decode_kernel[(num_kv_heads, plan.max_decode_items)](
            q,
            k_cache,
            v_cache,
            page_table,
            out,
            workspace.decode_items,
            workspace.totals,
            partials.partials,
            partials.partial_lse,
            workspace.arrived,
            q.stride(0),
            page_table.stride(0),
            scale_log2,
            cap_log2,
            given_sinks,
            **layout,
            **scored,
            BLOCK_M=max(16, group_rows),
            BLOCK_N=tile.block_n,
            GROUP_ROWS=group_rows,
            PARTS=max(2, 4096 // (group_rows * block_dim)),
            STAGES=tile.num_stages,
            SHARED=prefixes is not None,
            EARLY=lets_next_in(q.shape[0]),
            num_warps=tile.num_warps,
            **launch_options(q.device),
        )
    if plan.max_extend_items:
        tile = tiles[1] or extend_tile(
            q.dtype,
            block_dim,
            plan.block_rows,
            workspace.room,
            short_prompts=plan.short_prompts,
        )
        extend_kernel[(num_kv_heads, plan.max_extend_items)](
            q,
            k_cache,
            v_cache,
            page_table,
            out,
            workspace.extend_items,
            workspace.totals,
            workspace.totals if key_ends is None else key_ends,
            q.stride(0),
            page_table.stride(0),
            scale_log2,
            plan.window_left,
            cap_log2,
            given_sinks,
            **layout,
            **scored,
            WINDOWED=plan.window_left >= 0,
            SPANS=key_ends is not None,
            BLOCK_M=plan.block_rows,
            BLOCK_N=tile.block_n,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            **launch_options(q.device),
        )


def paged_attention(
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
    """Plan and compute one layer; see `kernels.paged_attention.paged_attention`.

    Each call allocates a workspace; the runtime's attention back end keeps one instead.
    """
    num_tokens, num_heads, head_dim = q.shape
    if out is None:
        out = q.new_empty(num_tokens, num_heads * head_dim)
    num_seqs = seq_lens.shape[0]
    if num_tokens == 0 or num_seqs == 0:
        return out
    workspace = AttentionWorkspace(
        num_seqs, num_tokens, num_heads, k_cache.shape[1], head_dim, q.device
    )
    plan = plan_attention(workspace, seq_lens, qo_indptr, num_tokens, None, window_left)
    run_attention(plan, q, k_cache, v_cache, page_table, scale, out, key_ends, softcap, sinks)
    return out
