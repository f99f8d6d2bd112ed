"""All-reduce of small tensors between GPUs that see each other's memory.

NCCL takes its time for a decode step's few kilobytes: every sum is two hops through its channels.
Here each rank's part lies in memory that all can read, they wait for one another inside the kernel,
and each adds all parts up, in order of rank: one hop, and the same bits on each. The kernel is
torch's (`torch.ops.symm_mem`), safe in CUDA graphs. It is the one without a copy, so another kernel
has written the part: in the one that copies as well, a warp may tell the others that the part is
there before the warps beside it have written theirs.

Source: one-shot all-reduce as in TensorRT-LLM and FasterTransformer's custom all-reduce.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

# Above this two rounds of fewer bytes are soon as fast, which NCCL does: on H200s from 8 MB on with
# two ranks, from 4 MB on with four.
MAX_BYTES = 2 * 1024 * 1024
# Measured so far. Each rank reads the parts of all others: with many, two rounds are better.
SIZES = (2, 4)
# The kernel wants whole 16-byte vectors.
_ALIGNMENT = 16


class OneShotAllReduce:
    """Sums of the ranks through shared device memory."""

    def __init__(self, buffer: Tensor, sum_of: Callable[[Tensor], Tensor]) -> None:
        """Sum what lies in `buffer` by `sum_of`."""
        self._buffer = buffer
        self._sum = sum_of

    @classmethod
    def shared(cls, device: torch.device, max_bytes: int = MAX_BYTES) -> Self:
        """Share a buffer of `max_bytes` with the other ranks; all call this together.

        Raises:
            RuntimeError, AttributeError: this torch has no such kernel, or the GPUs cannot
                read each other's memory.
        """
        import torch.distributed._symmetric_memory as symm_mem

        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        sum_of: Callable[..., Tensor] = torch.ops.symm_mem.one_shot_all_reduce
        buffer = symm_mem.empty(max_bytes, dtype=torch.uint8, device=device)
        symm_mem.rendezvous(buffer, group)
        return cls(buffer, lambda part: sum_of(part, "sum", group))

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return shared memory for a part, to be written and then summed before the next.

        The sum's end on a rank tells that all have read its part. None for one that is too large,
        no multiple of 16 bytes, or neither bfloat16 nor float32.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if not 0 < num_bytes <= self._buffer.nbytes or num_bytes % _ALIGNMENT:
            return None
        if dtype not in (torch.bfloat16, torch.float32):
            return None
        return self._buffer[:num_bytes].view(dtype).view(shape)

    def holds(self, x: Tensor) -> bool:
        """Whether `x` is what `place` gave."""
        return x.data_ptr() == self._buffer.data_ptr()

    def __call__(self, place: Tensor) -> Tensor:
        """Return the sum of all ranks' parts as a new tensor.

        Args:
            place: what `place` gave, written by then.
        """
        return self._sum(place)


def make(size: int, device: torch.device) -> OneShotAllReduce | None:
    """Return the faster sum where it can be had; all ranks call this together."""
    if size not in SIZES or device.type != "cuda":
        return None
    # Every rank looks at all pairs, so that all come to the same end.
    pairs = itertools.permutations(range(size), 2)
    if not all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
        return None
    try:
        return OneShotAllReduce.shared(device)
    except (RuntimeError, ImportError, AttributeError) as error:
        logger.info("Small sums go through NCCL: %s", str(error).splitlines()[0])
        return None
