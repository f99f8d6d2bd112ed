"""Decode steps of latent attention on Hopper; the host never reads a length from the device."""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.latent_attention.gluon_decode import join_parts_kernel, latent_decode_kernel
from kernels.triton_support.device import interpreted, multiprocessors
from kernels.triton_support.launch import launch_options


class DecodeTile(NamedTuple):
    """The sizes of the block that one program computes, and how many programs run at once.

    Attributes:
        heads: number of heads, the columns of the products.
        num_warps: warps of a program.
        num_stages: number of blocks of keys in shared memory.
        programs: number of programs that a multiprocessor has room for.
    """

    heads: int
    num_warps: int
    num_stages: int
    programs: int


# The fastest on an H200, in order of their heads. Memory limits a step of up to 16 heads: while one
# program of a multiprocessor computes, the other loads. With more heads, a program should compute
# many of them, because they share the keys that it loads.
TILES = (DecodeTile(16, 4, 1, 2), DecodeTile(32, 8, 2, 1), DecodeTile(64, 8, 2, 1))
# Keys of a block: the rows of the scores.
KEYS = 64
# The fewest blocks of a program. With fewer, combining one more partial result would take longer
# than the program saves.
MIN_BLOCKS = 2
# Parts of a sequence that are combined at once.
PARTS = 8
# Every program holds the lengths of all sequences.
_MOST_SEQS = 1024


@cache
def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or interpreted():
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


def fits(q: Tensor, rank: int) -> bool:
    """Return whether a step has the dtype and sizes for which `decode` was compared on a GPU.

    Args:
        q: `[num_seqs, num_heads, rank + rope_dim]`, one query per sequence.
        rank: number of elements of a latent; 512 in every published model.
    """
    num_seqs, _, width = q.shape
    has_sizes = rank == 512 and width - rank == 64
    return q.dtype.itemsize == 2 and has_sizes and num_seqs <= _MOST_SEQS


def can_decode(q: Tensor, rank: int) -> bool:
    """Return whether `decode` can compute a step: the GPU is a Hopper, and `fits` is true."""
    return _is_hopper(q.device) and fits(q, rank)


def decode(  # noqa: PLR0913 the op needs all of these
    q: Tensor,
    cache: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale_log2: float,
    rank: int,
    out: Tensor,
    tile: DecodeTile | None = None,
    kernels: tuple[Any, Any] = (latent_decode_kernel, join_parts_kernel),
    num_multiprocessors: int | None = None,
) -> None:
    """Attend from one query per sequence to all rows of its sequence.

    Args:
        q: `[num_seqs, num_heads, rank + rope_dim]`, contiguous, float16 or bfloat16.
        cache: `[num_pages, 1, page_size, rank + rope_dim]`, contiguous, the dtype of `q`.
        page_table: `[num_seqs, max_pages]` int32.
        seq_lens: `[num_seqs]` int32, number of keys.
        scale_log2: factor of the scores times the binary logarithm of e.
        rank: number of elements at the start of a row that are the row's value.
        out: `[num_seqs, num_heads * rank]`, written, except for sequences without keys.
        tile: replaces the tile that suits the number of heads, for tuning.
        kernels: the two kernels; a test passes emulated ones.
        num_multiprocessors: replaces the device's number, for tests.
    """
    num_seqs, num_heads, width = q.shape
    if tile is None:
        tile = next((each for each in TILES if num_heads <= each.heads), TILES[-1])
    head_blocks = triton.cdiv(num_heads, tile.heads)
    places = tile.programs * (num_multiprocessors or multiprocessors(q.device))
    num_programs = max(1, places // head_blocks)
    # A program has at most two parts of sequences that other programs share.
    partial = q.new_empty(2 * num_programs, num_heads, rank, dtype=torch.float32)
    state = q.new_empty(2 * num_programs, num_heads, dtype=torch.float32)
    sizes = {
        "RANK": rank,
        "BLOCK_N": KEYS,
        "SEQS": triton.next_power_of_2(num_seqs),
        "MIN_BLOCKS": MIN_BLOCKS,
    }
    attend, join = kernels
    attend[(num_programs, head_blocks)](
        q,
        cache,
        page_table,
        seq_lens,
        out,
        partial,
        state,
        scale_log2,
        num_seqs,
        num_heads,
        page_table.shape[1],
        ROPE=width - rank,
        PAGE_SIZE=cache.shape[2],
        BLOCK_H=tile.heads,
        WARPS=tile.num_warps,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **sizes,
    )
    warps = max(1, rank // 128)
    join[(num_seqs, num_heads)](
        partial,
        state,
        seq_lens,
        out,
        num_seqs,
        num_heads,
        num_programs,
        PARTS=PARTS,
        WARPS=warps,
        num_warps=warps,
        **sizes,
        **launch_options(q.device),
    )
