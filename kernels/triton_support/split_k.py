"""Products whose columns several programs share: the last one to finish adds the parts, in order.

A part's place in the sum does not depend on which program is the last, so the result does not
depend on timing.

Source of the sum by the last program: stream-K (Osama et al., 2023).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_support.scratch import StreamScratch

# Limits of the memory for parts of a product: float32 numbers, and blocks of the result.
MAX_PARTIALS = 1024 * 1024
MAX_BLOCKS = 8192


def _space(device: torch.device) -> tuple[Tensor, ...]:
    """Return memory for partial sums, and for the number of finished parts of each block.

    These numbers are 0 between two products.
    """
    return (
        torch.empty(MAX_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device),
    )


# One memory for all kernels, because those of a stream run one after the other.
_SPACE = StreamScratch(_space)


def fits(num_blocks: int, block_size: int, split: int) -> bool:
    """Return whether the parts of `num_blocks` blocks of `block_size` numbers fit in the memory."""
    return num_blocks * block_size * split <= MAX_PARTIALS and num_blocks <= MAX_BLOCKS


def space(device: torch.device, num_blocks: int, block_size: int, split: int) -> tuple[Tensor, ...]:
    """Return the arguments `partial_ptr` and `arrived_ptr` of a kernel; see `fits`."""
    assert fits(num_blocks, block_size, split)
    return _SPACE.get(device)


@triton.jit
def leave_part(
    acc,
    partial_ptr,
    arrived_ptr,
    place,
    part,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Write one part of block `place`, `[BLOCK_N, BLOCK_M]`.

    Returns the number of parts of the block that were written before.
    """
    inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    first_ptr = partial_ptr + place * (SPLIT_K * BLOCK_N * BLOCK_M)
    tl.store(first_ptr + part * (BLOCK_N * BLOCK_M) + inner, acc)
    # All threads' parts are written before the count is incremented.
    tl.debug_barrier()
    return tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel", scope="gpu")


@triton.jit
def sum_parts(
    partial_ptr,
    arrived_ptr,
    place,
    SPLIT_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return the sum of the parts of block `place`, and free the block.

    Only the program that wrote the last part calls this.
    """
    inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    first_ptr = partial_ptr + place * (SPLIT_K * BLOCK_N * BLOCK_M)
    tl.store(arrived_ptr + place, 0)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for other in tl.static_range(SPLIT_K):
        # The load bypasses the L1 cache, because other multiprocessors wrote these values.
        acc += tl.load(first_ptr + other * (BLOCK_N * BLOCK_M) + inner, cache_modifier=".cg")
    return acc
