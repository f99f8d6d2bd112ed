"""Latent attention in Triton; the host never reads a length from the device."""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.latent_attention import hopper
from kernels.latent_attention.hopper import DecodeTile
from kernels.latent_attention.triton_latent import (
    join_kernel,
    latent_kernel,
    rotate_and_keep_kernel,
)
from kernels.triton_support.device import SharedMemory, multiprocessors, shared_memory

LOG2E = math.log2(math.e)
# Heads of a program, because matrix instructions take 16 rows.
_HEADS = 16
_MOST_SPLITS = 32
_ROTATED_HEADS = 8


class LatentTile(NamedTuple):
    """The sizes of the block that one program computes.

    Attributes:
        tokens: number of queries of a sequence, each with 16 heads.
        keys: number of rows of the KV cache that are read at once.
        num_warps, num_stages: warps of a program, and stages of its load pipeline.
        waves: number of programs that should run on each multiprocessor at once; keys are split to
            reach it.
    """

    tokens: int
    keys: int
    num_warps: int
    num_stages: int
    waves: int


# The fastest of this kernel on an H200 for 64 sequences of 4,096 tokens: 65% of the bound that
# memory traffic sets. On Hopper most decode steps have another kernel.
DECODE = LatentTile(1, 64, 4, 3, 4)
# For sequences with several queries: 64 rows of the matrix instructions, if shared memory is large
# enough.
EXTEND = LatentTile(4, 64, 8, 3, 1)
SMALL_EXTEND = LatentTile(2, 32, 4, 2, 1)
_LARGE_BYTES = 160 * 1024
FLOATS = LatentTile(1, 16, 4, 1, 2)


def tile_of(
    dtype: torch.dtype, shared: SharedMemory, *, are_single: bool, invariant: bool
) -> LatentTile:
    """Return the tile for a step.

    Args:
        dtype: dtype of queries and rows.
        shared: shared memory of the device.
        are_single: whether every sequence has one query.
        invariant: whether a row must run through the same instructions for any number of queries.
    """
    if dtype is torch.float32:
        return FLOATS
    if are_single or invariant:
        return DECODE
    return EXTEND if shared.size >= _LARGE_BYTES else SMALL_EXTEND


def rotate_and_keep(  # noqa: PLR0913 the op's signature
    q_rope: Tensor,
    kv: Tensor,
    norm: Tensor,
    eps: float,
    cos_sin: Tensor,
    interleaved: bool,
    positions: Tensor,
    slots: Tensor,
    cache: Tensor,
    q: Tensor,
) -> None:
    """Write normed and rotated latents; see `kernels.latent_attention.rotate_and_keep`."""
    num_tokens, num_heads, rope_dim = q_rope.shape
    if not num_tokens:
        return
    rank = len(norm)
    assert q_rope.stride(2) == kv.stride(1) == 1
    assert cache.is_contiguous()
    assert cache.shape[-1] == rank + rope_dim
    assert cache.dtype.itemsize > 1
    assert q.is_contiguous()
    rotate_and_keep_kernel[(num_tokens, 1 + triton.cdiv(num_heads, _ROTATED_HEADS))](
        q_rope,
        kv,
        norm,
        cos_sin,
        positions,
        slots,
        cache,
        q,
        eps,
        num_heads,
        q_rope.stride(0),
        q_rope.stride(1),
        kv.stride(0),
        RANK=rank,
        HALF=rope_dim // 2,
        INTERLEAVED=interleaved,
        BLOCK_RANK=triton.next_power_of_2(rank),
        BLOCK_HALF=triton.next_power_of_2(rope_dim // 2),
        BLOCK_HEADS=_ROTATED_HEADS,
        num_warps=4,
    )


def num_splits(num_programs: int, waves: int, device: torch.device) -> int:
    """Return into how many parts keys are split, so that few sequences also fill the GPU.

    It is a power of two.
    """
    wanted = waves * multiprocessors(device) // num_programs
    return min(_MOST_SPLITS, 1 << max(0, wanted.bit_length() - 1))


def latent_attention(  # noqa: PLR0913 the op's signature
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    qo_indptr: Tensor,
    num_decodes: int | None,
    scale: float,
    rank: int,
    invariant: bool = False,
    tile: LatentTile | DecodeTile | None = None,
) -> Tensor:
    """Attend to cached latents; see `kernels.latent_attention.latent_attention`.

    `tile` replaces the tile that suits the step, for tuning.
    """
    num_tokens, num_heads, width = q.shape
    num_seqs = len(seq_lens)
    out = q.new_empty(num_tokens, num_heads * rank)
    if not num_tokens:
        return out
    assert q.is_contiguous()
    assert cache.is_contiguous()
    assert cache.dtype == q.dtype
    are_single = num_decodes == num_seqs == num_tokens
    if (
        are_single
        and not invariant
        and (isinstance(tile, DecodeTile) or (tile is None and hopper.can_decode(q, rank)))
    ):
        hopper.decode(q, cache, page_table, seq_lens, scale * LOG2E, rank, out, tile)
        return out
    assert not isinstance(tile, DecodeTile)
    if tile is None:
        shared = shared_memory(q.device)
        tile = tile_of(q.dtype, shared, are_single=are_single, invariant=invariant)
    num_blocks = num_tokens if are_single else num_tokens // tile.tokens + num_seqs
    head_blocks = triton.cdiv(num_heads, _HEADS)
    splits = 1 if invariant else num_splits(num_blocks * head_blocks, tile.waves, q.device)
    partial = state = q.new_empty(0, dtype=torch.float32)
    if splits > 1:
        partial = q.new_empty(num_tokens * num_heads, splits, rank, dtype=torch.float32)
        state = q.new_empty(num_tokens * num_heads, splits, dtype=torch.float32)
    latent_kernel[(num_blocks, head_blocks, splits)](
        q,
        cache,
        page_table,
        seq_lens,
        qo_indptr,
        out,
        partial,
        state,
        scale * LOG2E,
        num_seqs,
        num_heads,
        page_table.shape[1],
        RANK=rank,
        ROPE=width - rank,
        PAGE_SIZE=cache.shape[2],
        TOKENS=tile.tokens,
        BLOCK_H=_HEADS,
        BLOCK_N=tile.keys,
        BLOCK_RANK=max(16, triton.next_power_of_2(rank)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(width - rank)),
        SEQS=0 if are_single else triton.next_power_of_2(num_seqs),
        SPLITS=splits,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    if splits > 1:
        block = min(128, triton.next_power_of_2(rank))
        join_kernel[(num_tokens * num_heads, triton.cdiv(rank, block))](
            partial,
            state,
            out,
            RANK=rank,
            SPLITS=splits,
            BLOCK_SPLITS=splits,
            BLOCK=block,
            num_warps=2,
        )
    return out
