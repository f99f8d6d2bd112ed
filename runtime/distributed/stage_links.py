"""Point-to-point links between the stages of a model: NCCL on GPUs, gloo on CPUs."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch.distributed as dist
from torch import Tensor


class StageLinks:
    """Links of one rank to the rank of the same number in the stages before and after its own.

    The stages are a ring of `size` ranks each: the stage after the last ranks is that of rank 0.
    """

    def __init__(self, rank: int, size: int, num_stages: int) -> None:
        """Link `rank`, counted over all stages; the process group exists."""
        num_ranks = size * num_stages
        self._before = (rank - size) % num_ranks
        self._after = (rank + size) % num_ranks
        # A tensor must live until it is sent. No more steps than stages are in flight.
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._most = num_stages

    def receive(self, x: Tensor) -> Tensor:
        """Fill `x` with the next tensor of the stage before, of the same shape; return it."""
        dist.recv(x, self._before)
        return x

    def send(self, x: Tensor) -> None:
        """Send `x` to the stage after; `x` is not written any more."""
        if len(self._sent) >= self._most:
            self._sent.popleft()[0].wait()
        self._sent.append((dist.isend(x, self._after), x))
