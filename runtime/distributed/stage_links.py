"""Point-to-point links between pipeline stages: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch.distributed as dist
from torch import Tensor


class StageLinks:
    """Links a rank to the ranks with the same index in the previous and the next pipeline stage.

    The stages form a ring: rank 0 belongs to the last stage, and the first stage follows it.
    """

    def __init__(self, rank: int, size: int, num_stages: int) -> None:
        """Link one rank; the process group of all ranks must exist.

        Args:
            rank: index of this rank among the ranks of all stages.
            size: number of ranks per stage.
            num_stages: number of stages.
        """
        num_ranks = size * num_stages
        self._before = (rank - size) % num_ranks
        self._after = (rank + size) % num_ranks
        # Tensors that are being sent, which must not be freed. At most `num_stages` steps are in
        # flight.
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._most = num_stages

    def receive(self, x: Tensor) -> Tensor:
        """Fill `x` with the next tensor from the previous stage, of the same shape; return it."""
        dist.recv(x, self._before)
        return x

    def send(self, x: Tensor) -> None:
        """Send `x` to the next stage without waiting; `x` must not be written afterwards."""
        if len(self._sent) >= self._most:
            self._sent.popleft()[0].wait()
        self._sent.append((dist.isend(x, self._after), x))
