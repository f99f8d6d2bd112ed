"""Batch-invariant paged attention in Triton: the plan of a step, and the launches of its layers.

A kernel on the device writes the work list of rows and parts of keys, as in `triton_plan`, so that
a CUDA graph may be replayed with other lengths. If a sequence has one query in the step, several
programs share its keys, as far as the workspace has room for their partial sums. The kernel adds
these sums in a fixed order, so the split does not change the result.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.kv_forms import FLOATS_OF_8_BITS
from kernels.paged_attention.triton_invariant_kernel import attention_kernel
from kernels.paged_attention.triton_scores import score_options
from kernels.paged_attention.triton_tiles import MEASURED_DIM, ROOM_OF_WIDE_HEADS, widest_tile
from kernels.triton_support.device import shared_memory
from kernels.triton_support.launch import launch_options

__all__ = [
    "InvariantPlan",
    "InvariantWorkspace",
    "paged_attention",
    "plan_attention",
    "run_attention",
]

# One height of blocks for every step, because it determines the matrix instruction.
BLOCK_ROWS = 64
# Keys of a part; a multiple of every block of keys.
PART = 256
_ITEM_FIELDS = 8
# Parts of keys whose sums the workspace holds, enough to fill a device with few sequences. Programs
# past the end of a step's list exit immediately, but a thousand of them take a microsecond.
_MAX_SLOTS = 1024


@dataclass(frozen=True)
class Tile:
    """The sizes of the kernel's tile: keys per block, warps per program, loads in flight."""

    block_n: int
    num_warps: int
    num_stages: int


def tile_of(dtype: torch.dtype, block_dim: int, room: int) -> Tile:
    """Return the kernel's tile. It depends on the model and the device, never on the step.

    Args:
        dtype: dtype of keys.
        block_dim: head size of keys, rounded up to a power of two.
        room: bytes of shared memory available to a program.
    """
    if block_dim > MEASURED_DIM:
        widest = widest_tile(dtype, block_dim, room)
        return Tile(widest.block_n, widest.num_warps, widest.num_stages)
    if dtype is torch.float32:
        return Tile(32, 8, 2)
    if block_dim > 128 and room < ROOM_OF_WIDE_HEADS:
        return Tile(32, 8, 2)
    return Tile(64, 4 if block_dim <= 128 else 8, 2)


@triton.jit(do_not_specialize=["num_seqs", "window_left"])
def _plan_kernel(
    seq_lens_ptr,
    qo_indptr_ptr,
    items_ptr,
    totals_ptr,
    num_seqs,
    window_left,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PART_KEYS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_SEQS: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
):
    """Write the work items of one sequence.

    Every program sums the lengths of all sequences itself.
    """
    mine = tl.program_id(0)
    seq = tl.arange(0, BLOCK_SEQS)
    valid = seq < num_seqs
    kv_len = tl.load(seq_lens_ptr + seq, mask=valid, other=0)
    q_start = tl.load(qo_indptr_ptr + seq, mask=valid, other=0)
    num_queries = tl.load(qo_indptr_ptr + seq + 1, mask=valid, other=0) - q_start
    blocks = tl.cdiv(num_queries * GROUP, BLOCK_M)
    first_key = tl.where(window_left < 0, 0, tl.maximum(kv_len - 1 - window_left, 0))
    parts = tl.cdiv(kv_len, PART_KEYS) - first_key // PART_KEYS
    parts = tl.where((num_queries == 1) & (parts > 1), parts, 0)
    slots_end = tl.cumsum(parts, axis=0)
    parts = tl.where(slots_end <= SLOTS, parts, 0)
    count = tl.where(parts > 0, parts, blocks)
    if mine == 0:
        tl.store(totals_ptr, tl.sum(count))

    is_mine = seq == mine
    my_kv_len = tl.sum(tl.where(is_mine, kv_len, 0))
    my_q_start = tl.sum(tl.where(is_mine, q_start, 0))
    my_queries = tl.sum(tl.where(is_mine, num_queries, 0))
    my_parts = tl.sum(tl.where(is_mine, parts, 0))
    my_slot = tl.sum(tl.where(is_mine, slots_end - parts, 0))
    my_first_part = tl.sum(tl.where(is_mine, first_key, 0)) // PART_KEYS
    my_count = tl.sum(tl.where(is_mine, count, 0))
    begin = tl.sum(tl.where(seq < mine, count, 0))
    for first in range(0, my_count, BLOCK_ITEMS):
        k = first + tl.arange(0, BLOCK_ITEMS)
        inside = k < my_count
        item_ptr = items_ptr + (begin + k) * 8
        tl.store(item_ptr, mine + k * 0, mask=inside)
        # The last rows see the most keys, so they start first, to finish with the rest.
        tl.store(item_ptr + 1, tl.where(my_parts > 0, 0, my_count - 1 - k), mask=inside)
        tl.store(item_ptr + 2, my_q_start + k * 0, mask=inside)
        tl.store(item_ptr + 3, my_queries + k * 0, mask=inside)
        tl.store(item_ptr + 4, my_kv_len + k * 0, mask=inside)
        tl.store(item_ptr + 5, tl.where(my_parts > 0, my_first_part + k, -1), mask=inside)
        tl.store(item_ptr + 6, my_parts + k * 0, mask=inside)
        tl.store(item_ptr + 7, my_slot + k * 0, mask=inside)


class InvariantWorkspace:
    """Device memory of the batch-invariant attention kernel.

    Create one workspace per stream that runs attention and per distinct `window_left` in a model,
    before any graph is captured. `plan_attention` and the run of every layer write it. A plan is
    valid until the next plan with the same workspace.

    Attributes:
        num_slots: number of parts of keys whose sums can be stored.
        items: int32 work list; see `_plan_kernel`.
        totals: `[1]` int32, the length of the list.
        partials: `[num_slots, num_heads, head_dim rounded up]` float32, sums of single parts.
        states: `[num_slots, num_heads, 2]` float32, for each part the largest score and the sum of
            weights.
        arrived: `[max_seqs * num_kv_heads]` int32, number of finished parts; 0 between runs.
    """

    def __init__(
        self,
        max_seqs: int,
        max_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
    ) -> None:
        """Allocate for steps of at most `max_seqs` sequences and `max_tokens` new tokens."""
        group = num_heads // num_kv_heads
        assert group <= BLOCK_ROWS
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_slots = _MAX_SLOTS
        num_items = max_tokens * group // BLOCK_ROWS + max_seqs + self.num_slots
        block_dim = max(16, triton.next_power_of_2(head_dim))

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.items = empty(num_items, _ITEM_FIELDS)
        self.totals = empty(1)
        self.partials = empty(self.num_slots, num_heads, block_dim, dtype=torch.float32)
        self.states = empty(self.num_slots, num_heads, 2, dtype=torch.float32)
        self.arrived = torch.zeros(max_seqs * num_kv_heads, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class InvariantPlan:
    """The plan of a step, which all layers with the same `window_left` share.

    Attributes:
        workspace: the memory with the work list.
        window_left: `window_left` of the layers that use this plan.
        max_items: most programs in a launch.
    """

    workspace: InvariantWorkspace
    window_left: int
    max_items: int


def plan_attention(
    workspace: InvariantWorkspace,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    num_tokens: int,
    max_keys: int,
    window_left: int = -1,
) -> InvariantPlan:
    """Write a step's work list: one small launch, without synchronisation.

    The tensors are read when the launch runs on the device. A captured graph that holds this call
    and the layers' runs may therefore be replayed with other lengths in the same tensors.

    Args:
        workspace: memory that is large enough for the step.
        seq_lens: `[num_seqs]` int32, number of keys, including this step's tokens. 0 is allowed for
            padding rows of a graph, whose result is 0.
        qo_indptr: `[num_seqs + 1]` int32, bounds of each sequence's queries.
        num_tokens: rows of `q`, `qo_indptr[-1]` or more.
        max_keys: most keys of a sequence, including later replays of a graph.
        window_left: most keys before its own position that a query attends to; -1 for all.
    """
    num_seqs = seq_lens.shape[0]
    assert num_seqs <= workspace.max_seqs
    assert num_tokens <= workspace.max_tokens
    assert seq_lens.dtype is torch.int32
    assert qo_indptr.dtype is torch.int32
    group = workspace.num_heads // workspace.num_kv_heads
    # A window of keys may begin and end within a part.
    keys = max_keys if window_left < 0 else min(max_keys, window_left + PART)
    max_parts = min(workspace.num_slots, num_seqs * triton.cdiv(keys, PART))
    if num_seqs:
        _plan_kernel[(num_seqs,)](
            seq_lens,
            qo_indptr,
            workspace.items,
            workspace.totals,
            num_seqs,
            window_left,
            GROUP=group,
            BLOCK_M=BLOCK_ROWS,
            PART_KEYS=PART,
            SLOTS=workspace.num_slots,
            # The number depends on the workspace, not on the step, so that one compilation serves
            # every batch size.
            BLOCK_SEQS=max(16, triton.next_power_of_2(workspace.max_seqs)),
            BLOCK_ITEMS=128,
            num_warps=4,
        )
    max_blocks = num_tokens * group // BLOCK_ROWS + num_seqs
    return InvariantPlan(workspace, window_left, max_blocks + max_parts if num_seqs else 0)


def run_attention(
    plan: InvariantPlan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    scale: float,
    out: Tensor,
    key_ends: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    tile: Tile | None = None,
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
        tile: the tile, for tuning; `None` for the usual tile. Another `block_n` changes the bits.
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
    assert sinks is None or sinks.dtype is torch.float32
    if plan.max_items == 0:
        return
    group = num_heads // num_kv_heads
    block_dim = max(16, triton.next_power_of_2(head_dim))
    tile = tile or tile_of(q.dtype, block_dim, shared_memory(q.device).size)
    attention_kernel[(num_kv_heads, plan.max_items)](
        q,
        k_cache,
        v_cache,
        page_table,
        out,
        workspace.items,
        workspace.totals,
        workspace.totals if key_ends is None else key_ends,
        workspace.partials,
        workspace.states,
        workspace.arrived,
        q.stride(0),
        page_table.stride(0),
        scale * math.log2(math.e),
        plan.window_left,
        softcap * math.log2(math.e),
        workspace.states if sinks is None else sinks,
        **score_options(softcap, sinks),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_ROWS=triton.next_power_of_2(group),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        WINDOWED=plan.window_left >= 0,
        SPANS=key_ends is not None,
        PART=PART,
        BLOCK_M=BLOCK_ROWS,
        BLOCK_N=tile.block_n,
        BLOCK_D=block_dim,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        # Two places in the kernel add parts. The compiler must not fuse a product and a sum in only
        # one of them.
        enable_fp_fusion=False,
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
    workspace = InvariantWorkspace(
        num_seqs, num_tokens, num_heads, k_cache.shape[1], head_dim, q.device
    )
    max_keys = page_table.shape[1] * k_cache.shape[2]
    plan = plan_attention(workspace, seq_lens, qo_indptr, num_tokens, max_keys, window_left)
    run_attention(plan, q, k_cache, v_cache, page_table, scale, out, key_ends, softcap, sinks)
    return out
