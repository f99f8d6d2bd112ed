"""The tiles of the Triton attention kernels, measured on an H200 in bfloat16 with pages of 16.

The address of a key comes from the page table. So the pipeline loads page numbers before keys, and
the page numbers take half of its stages. With five stages, a block's keys are loaded during the
products of the previous block. With fewer stages, a program requests a block's keys after these
products and waits for them. More stages take more shared memory, so fewer programs run on a
multiprocessor; programs that run beside one another hide each other's waits
(docs/decisions/0020-attention-cuts.md).
"""

from dataclasses import dataclass

import torch

from kernels.paged_attention.shared_prefix import KEY_GRAIN

# Query rows (tokens times heads of a group) of an extend item.
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 64, 128

# Shared memory that the measured blocks need for heads of 256; less, such as Ada's 101,376 bytes,
# is too small for them.
ROOM_OF_WIDE_HEADS = 128 * 1024


@dataclass(frozen=True)
class Tile:
    """How a kernel is tiled: keys per block, warps per program, stages of its load pipeline."""

    block_n: int
    num_warps: int
    num_stages: int


def takes_long_chunks(head_dim: int, load: float) -> bool:
    """Whether decode is faster with half as many programs on longer chunks.

    Args:
        head_dim: elements of a key's head.
        load: decoding sequences times key heads, per multiprocessor. At a high load, splitting
            sequences costs more than it gains (figures: decision 0020).
    """
    return head_dim <= 128 and 0.75 <= load < (4 if head_dim <= 64 else 3)


def decode_tile(dtype: torch.dtype, block_dim: int, load: float, kept_bytes: int = 2) -> Tile:
    """Return the decode tile.

    Args:
        dtype: dtype of the queries.
        block_dim: elements of a head, rounded up.
        load: as in `takes_long_chunks`, 0 if chunks are short.
        kept_bytes: bytes of one number of a key in the cache. The tiles for one byte were measured
            on an H100.
    """
    if dtype is torch.float32 or block_dim > 128:
        return Tile(32, 4, 2)
    if block_dim > 64 and kept_bytes == 1:
        return Tile(128, 4, 5) if 0.25 <= load < 3 else Tile(64, 2, 5 if load >= 3 else 2)
    if block_dim > 64:
        # More programs hide each other's latency.
        return Tile(64, 2, 5 if 0.25 <= load < 3 else 2)
    if takes_long_chunks(block_dim, load):
        return Tile(128, 4, 5 if load < 1.25 else 2)
    return Tile(64, 2, 2)


def block_rows_of(
    load: float, mean_rows: float, head_dim: int, room: int, *, short_prompts: bool
) -> int:
    """Return the rows of an extend item.

    With fewer than 64 rows, Hopper's tensor cores would need their operands in registers, which is
    rarely faster even if most rows are padding.

    Args:
        load: programs of 128 rows per multiprocessor.
        mean_rows: query rows per sequence.
        head_dim: elements of a key's head.
        room: bytes of shared memory available to a program.
        short_prompts: whether queries see only the step's own keys, which are usually few.
    """
    few = load <= 2 or 2 * mean_rows <= MAX_BLOCK_ROWS
    few |= head_dim <= 64 and not short_prompts
    few |= head_dim > 128 and room < ROOM_OF_WIDE_HEADS
    return MIN_BLOCK_ROWS if few else MAX_BLOCK_ROWS


def extend_tile(
    dtype: torch.dtype, block_dim: int, block_rows: int, *, short_prompts: bool
) -> Tile:
    """Return the extend tile, see `block_rows_of`."""
    small = block_dim <= 64
    if dtype is torch.float32 or block_dim > 128:
        return Tile(32, 8 if block_rows > 64 else 4, 2)
    if block_rows <= 64:
        return Tile(128 if small and not short_prompts else 64, 4, 5)
    if small:
        return Tile(64, 8, 2)
    # A short program should have others beside it.
    return Tile(32, 4, 5) if short_prompts else Tile(64, 8, 5)


def prefix_tile(dtype: torch.dtype, block_dim: int) -> Tile:
    """Return the tile of attention to shared prefixes; blocks of keys divide `KEY_GRAIN`."""
    if dtype is torch.float32 or block_dim > 128:
        return Tile(KEY_GRAIN // 2, 4, 2)
    return Tile(KEY_GRAIN, 4, 5)
