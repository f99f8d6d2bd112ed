"""The ranks that share each layer: sums, gathers and the tokens of rank 0.

NCCL between GPUs, but for small sums; gloo between processes on the CPU. Everything runs on the
device's current stream, so CUDA graphs capture it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.distributed import one_shot

# Renamed in newer versions of torch.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TensorGroup:
    """One rank's view of the group; every rank makes the same calls in the same order.

    Attributes:
        rank: 0 decides, the others follow.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store: Path) -> None:
        """Meet the other ranks; returns once all are there.

        Args:
            rank: below `size`.
            size: at least 2.
            device: this rank's.
            store: a file that does not exist yet, the same for every rank.
        """
        self.rank = rank
        self.size = size
        self._device = device
        # All ranks are on this machine; nobody else is to reach their sockets.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo")
        is_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            device_id=device if is_gpu else None,
        )
        self._one_shot = one_shot.make(size, device)
        if not all(self.minimum(self._one_shot is not None)):
            self._one_shot = None

    def place(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Return `[num_rows, width]` for what `all_reduce` sums next; None if anywhere does."""
        return None if self._one_shot is None else self._one_shot.place((num_rows, width), dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, bitwise the same on each; may overwrite `x`."""
        if self._one_shot is not None and self._one_shot.holds(x):
            return self._one_shot(x)
        dist.all_reduce(x)
        return x

    def sum_in_order(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks in place, rank 0 first, and return it.

        The backend's own sum may go another way round for another number of rows, and so round
        differently; here an element's sum is the same in every batch, and on each rank.
        """
        parts = x.new_empty(self.size, x.numel())
        _gather(parts.view(-1), x.contiguous().view(-1))
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return x.copy_(total.view(x.shape))

    def gather_columns(self, x: Tensor) -> Tensor:
        """Join the ranks' `[num_rows, width]` to `[num_rows, size * width]`, in order of rank."""
        num_rows, width = x.shape
        parts = x.new_empty(self.size * num_rows, width)
        _gather(parts, x.contiguous())
        if num_rows == 1:
            return parts.view(1, -1)
        parts = parts.view(self.size, num_rows, width).transpose(0, 1)
        return parts.reshape(num_rows, self.size * width)

    def share(self, x: Tensor) -> Tensor:
        """Overwrite `x` with that of rank 0 and return it."""
        dist.broadcast(x, 0)
        return x

    def minimum(self, *values: int) -> list[int]:
        """The least of each value over the ranks; waits for all of them."""
        numbers = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return numbers.tolist()
