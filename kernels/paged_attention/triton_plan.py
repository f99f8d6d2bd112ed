"""The work lists of the Triton attention kernels, built on the device.

The keys of a step's decode rows are split into chunks, so that a few long sequences fill the device
as well as many short ones. The step's prefill chunks are split into blocks of query rows. Both work
lists depend on lengths that only the device knows. So a small kernel writes them once per step, and
the attention kernels of all layers read them.

The host computes upper bounds of the lists' lengths from shapes and launches this many programs;
programs past the end of a list exit immediately. The host never waits for the device, and a CUDA
graph may capture all of it.

Source: FlashInfer (Ye et al., 2025) separates plan and run in this way, but plans on the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.paged_attention.shared_prefix import ITEM_FIELDS, SharedPrefixes
from kernels.paged_attention.triton_tiles import (
    MAX_BLOCK_ROWS,
    MIN_BLOCK_ROWS,
    block_rows_of,
    takes_long_chunks,
)
from kernels.triton_support.device import multiprocessors, shared_memory

# Chunks of keys are multiples of this number, and thus of the decode kernel's block.
CHUNK_GRAIN = 64
# The desired number of decode programs in flight on each multiprocessor.
_DECODE_PROGRAMS = 2
# The most chunks of one sequence, unless these would be longer than _LONG_CHUNK. More chunks would
# cost more, because their results are added.
_MAX_PARTS = 32
_LONG_CHUNK = 512


@triton.jit(do_not_specialize=["num_seqs", "num_decodes", "window_left", "wanted_items"])
def _plan_kernel(
    seq_lens_ptr,
    qo_indptr_ptr,
    decode_items_ptr,
    extend_items_ptr,
    totals_ptr,
    shared_lens_ptr,
    shared_parts_ptr,
    first_slots_ptr,
    num_seqs,
    num_decodes,
    window_left,
    wanted_items,
    max_parts,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GRAIN: tl.constexpr,
    LONG_CHUNK: tl.constexpr,
    SHARED: tl.constexpr,
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
    # If the caller does not know `num_decodes`, every sequence with one query decodes.
    decodes = (seq < num_decodes) | ((num_decodes < 0) & (num_queries == 1))
    keys = tl.where(window_left < 0, kv_len, tl.minimum(kv_len, window_left + 1))
    keys = tl.where(decodes, keys, 0)
    shared_parts = seq * 0
    if SHARED:
        # The programs of a group process the shared keys. The newest key is never among them.
        keys = tl.maximum(keys - tl.load(shared_lens_ptr + seq, mask=valid, other=0), 0)
        shared_parts = tl.load(shared_parts_ptr + seq, mask=valid, other=0)
    chunk = tl.cdiv(tl.maximum(tl.cdiv(tl.sum(keys), wanted_items), 1), GRAIN) * GRAIN
    # A sequence without keys also gets an item, because its output must be written.
    parts = tl.minimum(tl.cdiv(keys, chunk), tl.maximum(max_parts, keys // LONG_CHUNK))
    decode_count = tl.where(decodes & valid, tl.maximum(parts, 1), 0)
    extend_count = tl.where(decodes, 0, tl.cdiv(num_queries * GROUP, BLOCK_ROWS))
    if mine == 0:
        tl.store(totals_ptr, tl.sum(decode_count))
        tl.store(totals_ptr + 1, tl.sum(extend_count))

    is_mine = seq == mine
    my_kv_len = tl.sum(tl.where(is_mine, kv_len, 0))
    my_q_start = tl.sum(tl.where(is_mine, q_start, 0))
    my_queries = tl.sum(tl.where(is_mine, num_queries, 0))
    my_keys = tl.sum(tl.where(is_mine, keys, 0))

    count = tl.sum(tl.where(is_mine, decode_count, 0))
    begin = tl.sum(tl.where(seq < mine, decode_count, 0))
    # The chunks have equal size, so that a sequence slightly longer than a chunk is not split into
    # a long and a short one.
    share = tl.cdiv(tl.cdiv(my_keys, tl.maximum(count, 1)), GRAIN) * GRAIN
    my_shared = tl.sum(tl.where(is_mine, shared_parts, 0))
    slot = begin + tl.sum(tl.where(seq < mine, shared_parts, 0))
    if SHARED:
        tl.store(first_slots_ptr + mine, slot)
    for first in range(0, count, BLOCK_ITEMS):
        k = first + tl.arange(0, BLOCK_ITEMS)
        item_ptr = decode_items_ptr + (begin + k) * 8
        key = my_kv_len - my_keys + k * share
        tl.store(item_ptr, mine + k * 0, mask=k < count)
        tl.store(item_ptr + 1, key, mask=k < count)
        tl.store(item_ptr + 2, tl.minimum(key + share, my_kv_len), mask=k < count)
        tl.store(item_ptr + 3, slot + k * 0, mask=k < count)
        tl.store(item_ptr + 4, my_shared + count + k * 0, mask=k < count)
        tl.store(item_ptr + 5, my_q_start + k * 0, mask=k < count)
        if SHARED:
            tl.store(item_ptr + 6, slot + my_shared + k, mask=k < count)
            tl.store(item_ptr + 7, count + k * 0, mask=k < count)

    count = tl.sum(tl.where(is_mine, extend_count, 0))
    begin = tl.sum(tl.where(seq < mine, extend_count, 0))
    for first in range(0, count, BLOCK_ITEMS):
        k = first + tl.arange(0, BLOCK_ITEMS)
        item_ptr = extend_items_ptr + (begin + k) * 8
        tl.store(item_ptr, mine + k * 0, mask=k < count)
        # The last rows see the most keys, so they start first, to finish with the rest.
        tl.store(item_ptr + 1, count - 1 - k, mask=k < count)
        tl.store(item_ptr + 2, my_q_start + k * 0, mask=k < count)
        tl.store(item_ptr + 3, my_queries + k * 0, mask=k < count)
        tl.store(item_ptr + 4, my_kv_len + k * 0, mask=k < count)


class AttentionWorkspace:
    """Device memory of the Triton attention kernels.

    Create one workspace per stream that runs attention and per distinct `window_left` in a model,
    before any graph is captured. `plan_attention` and the run of every layer write it. A plan is
    valid until the next plan with the same workspace.

    Attributes:
        multiprocessors: number of the device's multiprocessors.
        room: bytes of shared memory available to a program.
        wanted_items: about the most chunks into which a step's keys are split.
        max_parts: most chunks of a sequence of ordinary length.
        decode_items: int32 work list of chunks of keys; see `_plan_kernel`.
        extend_items: int32 work list of blocks of query rows.
        totals: `[2]` int32, the lengths of both lists.
        partials: `[items, num_heads, head_dim rounded up]` float32, results of single chunks.
        partial_lse: `[items, num_heads]` float32, base-2 log-sum-exp of single chunks.
        arrived: `[max_seqs * num_kv_heads]` int32, number of finished chunks; 0 between runs.
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
        self.max_seqs = max_seqs
        self.max_tokens = max_tokens
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.multiprocessors = multiprocessors(device)
        self.room = shared_memory(device).size
        self.wanted_items = max(1, self.multiprocessors * _DECODE_PROGRAMS // num_kv_heads)
        decode_items = max_seqs + self.wanted_items
        extend_items = max_tokens * (num_heads // num_kv_heads) // MIN_BLOCK_ROWS + max_seqs
        self.max_parts = _MAX_PARTS
        block_dim = max(16, triton.next_power_of_2(head_dim))

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.decode_items = empty(decode_items, ITEM_FIELDS)
        self.extend_items = empty(extend_items, ITEM_FIELDS)
        self.totals = empty(2)
        self.partials = empty(decode_items, num_heads, block_dim, dtype=torch.float32)
        self.partial_lse = empty(decode_items, num_heads, dtype=torch.float32)
        self.arrived = torch.zeros(max_seqs * num_kv_heads, dtype=torch.int32, device=device)


@dataclass(frozen=True)
class AttentionPlan:
    """The plan of a step, which all layers with the same `window_left` share.

    Attributes:
        workspace: the memory with the work lists.
        window_left: `window_left` of the layers that use this plan.
        max_decode_items: most programs in a decode launch; 0 for no launch.
        max_extend_items: most programs in an extend launch; 0 for no launch.
        block_rows: query rows (tokens times the heads that share a key head) of an extend item.
        decode_load: number of decoding sequences times key heads, per multiprocessor; 0 if most of
            their keys are shared.
        short_prompts: whether prefill chunks have no cached prefix.
        prefixes: the step's groups of sequences with shared first keys; `None` if there cannot be
            any.
    """

    workspace: AttentionWorkspace
    window_left: int
    max_decode_items: int
    max_extend_items: int
    block_rows: int
    decode_load: float = 0.0
    short_prompts: bool = False
    prefixes: SharedPrefixes | None = None


def plan_attention(
    workspace: AttentionWorkspace,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    num_tokens: int,
    num_decodes: int | None = None,
    window_left: int = -1,
    prefixes: SharedPrefixes | None = None,
    *,
    short_prompts: bool = False,
    block_rows: int | None = None,
) -> AttentionPlan:
    """Write a step's work lists: one small launch, without synchronisation.

    The tensors are read when the launch runs on the device. A captured graph that holds this call
    and the layers' runs may therefore be replayed with other lengths in the same tensors.

    Args:
        workspace: memory that is large enough for the step.
        seq_lens: `[num_seqs]` int32, number of keys, including this step's tokens. 0 is allowed for
            padding rows of a graph, whose result is 0.
        qo_indptr: `[num_seqs + 1]` int32, bounds of each sequence's queries.
        num_tokens: rows of `q`, `qo_indptr[-1]` or more.
        num_decodes: number of sequences with exactly one query at the start of the batch. `None` if
            the host does not know it, which costs a launch per layer.
        window_left: most keys before its own position that a query attends to; -1 for all.
        prefixes: the sequences that share their first keys; only for decode steps without a window.
        short_prompts: whether all sequences after the first `num_decodes` have only this step's
            keys, which are usually few. They use another tile.
        block_rows: query rows of an extend item; `None` to choose them by the step's load.
    """
    num_seqs = seq_lens.shape[0]
    assert num_seqs <= workspace.max_seqs
    assert num_tokens <= workspace.max_tokens
    assert seq_lens.dtype is torch.int32
    assert qo_indptr.dtype is torch.int32
    group = workspace.num_heads // workspace.num_kv_heads
    may_decode = num_seqs if num_decodes is None else num_decodes
    extend_seqs = num_seqs if num_decodes is None else num_seqs - num_decodes
    extend_tokens = num_tokens if num_decodes is None else num_tokens - num_decodes
    extend_rows = extend_tokens * group if extend_seqs else 0
    # If `num_decodes` is not known, most sequences are assumed to decode.
    num_chunks = 1 if num_decodes is None else max(1, extend_seqs)
    extend_load = extend_rows * workspace.num_kv_heads / workspace.multiprocessors
    if block_rows is None:
        block_rows = block_rows_of(
            extend_load / MAX_BLOCK_ROWS,
            extend_rows / num_chunks,
            workspace.head_dim,
            workspace.room,
            short_prompts=short_prompts,
        )
    decode_load = 0.0
    if prefixes is None:
        decode_load = may_decode * workspace.num_kv_heads / workspace.multiprocessors
    long_chunks = takes_long_chunks(workspace.head_dim, decode_load)
    wanted_items = max(1, workspace.wanted_items // (2 if long_chunks else 1))
    plan = AttentionPlan(
        workspace=workspace,
        window_left=window_left,
        max_decode_items=may_decode + wanted_items if may_decode else 0,
        max_extend_items=extend_rows // block_rows + extend_seqs if extend_rows else 0,
        block_rows=block_rows,
        decode_load=decode_load,
        short_prompts=short_prompts,
        prefixes=prefixes,
    )
    shared = (workspace.totals,) * 3
    if prefixes is not None:
        assert window_left < 0
        assert num_decodes == num_seqs == num_tokens <= prefixes.max_seqs
        shared = prefixes.lens, prefixes.parts, prefixes.first_slots
    if num_seqs:
        _plan_kernel[(num_seqs,)](
            seq_lens,
            qo_indptr,
            workspace.decode_items,
            workspace.extend_items,
            workspace.totals,
            *shared,
            num_seqs,
            -1 if num_decodes is None else num_decodes,
            window_left,
            wanted_items,
            workspace.max_parts,
            GROUP=group,
            BLOCK_ROWS=block_rows,
            GRAIN=CHUNK_GRAIN,
            LONG_CHUNK=_LONG_CHUNK,
            SHARED=prefixes is not None,
            # The number depends on the workspace, not on the step, so that one compilation serves
            # every batch size.
            BLOCK_SEQS=max(16, triton.next_power_of_2(workspace.max_seqs)),
            BLOCK_ITEMS=128,
            num_warps=4,
        )
    return plan
