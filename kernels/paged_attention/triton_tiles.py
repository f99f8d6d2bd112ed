"""The tiles of the Triton attention kernels, measured on an H200 in bfloat16 with pages of 16.

The address of a key comes from the block table. The load pipeline therefore loads page numbers
before keys, and page numbers take half of its stages. With five stages, a block's keys are loaded
during the products of the previous block. With fewer stages, a program requests a block's keys only
after these products and waits for them. But more stages take more shared memory, so fewer programs
run on a multiprocessor at once, and such programs hide each other's waits
(docs/decisions/0020-attention-cuts.md).
"""

from dataclasses import dataclass

import torch

from kernels.paged_attention.shared_prefix import KEY_GRAIN

# Query rows (tokens times the heads that share a key head) of an extend item.
MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 64, 128

# The widest heads of which tiles were measured.
MEASURED_DIM = 256
# Shared memory that the measured tiles need for heads of 256. Less memory, such as Ada's 101,376
# bytes, is too small for these tiles.
ROOM_OF_WIDE_HEADS = 128 * 1024

# From this load on, smaller tiles are faster for 8-bit keys. Loads of 7.8 and 15.5 were measured.
_HIGH_LOAD_OF_8_BITS = 8


@dataclass(frozen=True)
class Tile:
    """The sizes of a tile: keys per block, warps per program, stages of the load pipeline."""

    block_n: int
    num_warps: int
    num_stages: int


def takes_long_chunks(head_dim: int, load: float) -> bool:
    """Whether decode is faster with half as many programs on longer chunks.

    A chunk is a part of a sequence's keys that one program reads.

    Args:
        head_dim: elements of a key's head.
        load: number of decoding sequences times key heads, per multiprocessor. At a high load,
            splitting sequences costs more than it gains (figures: decision 0020).
    """
    return head_dim <= 128 and 0.75 <= load < (4 if head_dim <= 64 else 3)


def decode_tile(dtype: torch.dtype, block_dim: int, load: float, kept_bytes: int = 2) -> Tile:
    """Return the tile of the decode kernel.

    Args:
        dtype: dtype of the queries.
        block_dim: elements of a head, rounded up to a power of two.
        load: number of decoding sequences times key heads, per multiprocessor; 0 if the step reads
            shared prefixes, because then each program reads few keys.
        kept_bytes: size in bytes of one element of the KV cache.
    """
    if block_dim > MEASURED_DIM:
        return Tile(16, 4, 2)
    if dtype is torch.float32 or block_dim > 128:
        return Tile(32, 4, 2)
    if block_dim > 64 and kept_bytes == 1:
        if 0.25 <= load < _HIGH_LOAD_OF_8_BITS:
            return Tile(128, 4, 5 if load < 3 else 2)
        return Tile(64, 2, 5 if load >= _HIGH_LOAD_OF_8_BITS else 2)
    if block_dim > 64:
        # More programs hide each other's latency.
        return Tile(64, 2, 5 if 0.25 <= load < 3 else 2)
    if takes_long_chunks(block_dim, load):
        return Tile(128, 4, 5 if load < 1.25 else 2)
    return Tile(64, 2, 2)


def block_rows_of(
    load: float, mean_rows: float, head_dim: int, room: int, *, short_prompts: bool
) -> int:
    """Return the number of query rows of an extend item.

    With fewer than 64 rows, Hopper's tensor cores would need their operands in registers. This is
    rarely faster, even if most of 64 rows are padding.

    Args:
        load: number of programs of 128 rows per multiprocessor.
        mean_rows: query rows per sequence.
        head_dim: elements of a key's head.
        room: bytes of shared memory available to a program.
        short_prompts: whether queries see only the step's own keys, which are usually few.
    """
    few = load <= 2 or 2 * mean_rows <= MAX_BLOCK_ROWS
    few |= head_dim <= 64 and not short_prompts
    few |= head_dim > 128 and room < ROOM_OF_WIDE_HEADS
    few |= head_dim > MEASURED_DIM
    return MIN_BLOCK_ROWS if few else MAX_BLOCK_ROWS


def widest_tile(dtype: torch.dtype, block_dim: int, room: int) -> Tile:
    """Return a tile of `MIN_BLOCK_ROWS` queries for heads above `MEASURED_DIM`, such as Gemma 4's.

    It is the largest tile whose queries, keys and values fit `room` bytes of shared memory. This
    was checked by compiling it for each kind of GPU; its speed was not measured.

    Args:
        dtype: dtype of the queries.
        block_dim: elements of a head, rounded up to a power of two.
        room: bytes of shared memory available to a program.
    """
    row_bytes = block_dim * dtype.itemsize
    for block_n, num_stages in ((32, 2), (32, 1)):
        if (MIN_BLOCK_ROWS + 2 * block_n * num_stages) * row_bytes <= room:
            return Tile(block_n, 8, num_stages)
    return Tile(16, 8, 1)


def extend_tile(
    dtype: torch.dtype, block_dim: int, block_rows: int, room: int, *, short_prompts: bool
) -> Tile:
    """Return the tile of the extend kernel.

    Args:
        dtype: dtype of the queries.
        block_dim: elements of a head, rounded up to a power of two.
        block_rows: query rows of an extend item, from `block_rows_of`.
        room: bytes of shared memory available to a program.
        short_prompts: whether queries see only the step's own keys, which are usually few.
    """
    if block_dim > MEASURED_DIM:
        return widest_tile(dtype, block_dim, room)
    small = block_dim <= 64
    if dtype is torch.float32 or block_dim > 128:
        return Tile(32, 8 if block_rows > 64 else 4, 2)
    if block_rows <= 64:
        return Tile(128 if small and not short_prompts else 64, 4, 5)
    if small:
        return Tile(64, 8, 2)
    # Programs with few keys need other programs on the same multiprocessor to hide their waits.
    return Tile(32, 4, 5) if short_prompts else Tile(64, 8, 5)


def prefix_tile(dtype: torch.dtype, block_dim: int, room: int) -> Tile:
    """Return the tile of the kernel for shared prefixes; its block of keys divides `KEY_GRAIN`.

    Args:
        dtype: dtype of the queries.
        block_dim: elements of a head, rounded up to a power of two.
        room: bytes of shared memory available to a program.
    """
    if block_dim > MEASURED_DIM:
        return widest_tile(dtype, block_dim, room)
    if dtype is torch.float32 or block_dim > 128:
        return Tile(KEY_GRAIN // 2, 4, 2)
    return Tile(KEY_GRAIN, 4, 5)
