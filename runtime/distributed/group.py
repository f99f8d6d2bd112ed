"""Communication of the ranks that share each layer: sums, gathers, and broadcasts from rank 0.

GPUs communicate through NCCL, except for small sums. CPU processes use gloo. All operations run on
the device's current stream, so CUDA graphs can capture them.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from runtime.config.parallel_options import NodeLink
from runtime.ipc.node_links import interface_of

logger = logging.getLogger(__name__)

# Larger sums go through NCCL, which is at least as fast there: its two rounds move fewer bytes. On
# H200s this holds from 8 MB on with two ranks, and from 4 MB on with four.
MAX_BYTES = 2 * 1024 * 1024
# The numbers of ranks for which the one-shot sum is used; only these were measured. Each rank reads
# the parts of all others, so with many ranks two rounds are better.
SIZES = (2, 4)
# The kernel reads vectors of 16 bytes.
_ALIGNMENT = 16


class OneShotAllReduce:
    """Sums tensors of all ranks in one round: each rank reads the other ranks' device memory."""

    def __init__(self, buffer: Tensor, sum_of: Callable[[Tensor], Tensor]) -> None:
        """Use `buffer`, which all ranks share, and `sum_of`, which sums the ranks' parts in it."""
        self._buffer = buffer
        self._sum = sum_of

    @classmethod
    def shared(cls, device: torch.device, max_bytes: int = MAX_BYTES) -> Self:
        """Create a buffer of `max_bytes` that all ranks can read; all ranks call this together.

        Raises:
            RuntimeError, AttributeError: this version of torch has no such kernel, or the GPUs
                cannot read each other's memory.
        """
        import torch.distributed._symmetric_memory as symm_mem

        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        sum_of: Callable[..., Tensor] = torch.ops.symm_mem.one_shot_all_reduce
        buffer = symm_mem.empty(max_bytes, dtype=torch.uint8, device=device)
        symm_mem.rendezvous(buffer, group)
        return cls(buffer, lambda part: sum_of(part, "sum", group))

    def place(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Return shared memory for this rank's part of a sum.

        Write the part there and sum it before the next call. When the sum is complete on a rank,
        all ranks have read that rank's part.

        Args:
            shape: shape of the part.
            dtype: bfloat16 or float32.

        Returns:
            A tensor in shared memory. `None` if the part is too large, its size is not a multiple
            of 16 bytes, or `dtype` is not supported.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if not 0 < num_bytes <= self._buffer.nbytes or num_bytes % _ALIGNMENT:
            return None
        if dtype not in (torch.bfloat16, torch.float32):
            return None
        return self._buffer[:num_bytes].view(dtype).view(shape)

    def holds(self, x: Tensor) -> bool:
        """Whether `x` is memory that `place` has returned."""
        return x.data_ptr() == self._buffer.data_ptr()

    def __call__(self, place: Tensor) -> Tensor:
        """Return the sum of all ranks' parts as a new tensor.

        Args:
            place: the tensor from `place`, which has this rank's part.
        """
        return self._sum(place)


def make_one_shot(size: int, device: torch.device) -> OneShotAllReduce | None:
    """Return the one-shot sum; `None` if it cannot work here. All ranks call this together."""
    if size not in SIZES or device.type != "cuda":
        return None
    # Every rank checks all pairs of ranks, so that all ranks get the same result.
    pairs = itertools.permutations(range(size), 2)
    if not all(torch.cuda.can_device_access_peer(*pair) for pair in pairs):
        return None
    try:
        return OneShotAllReduce.shared(device)
    except (RuntimeError, ImportError, AttributeError) as error:
        logger.info("Small sums go through NCCL: %s", str(error).splitlines()[0])
        return None


# torch has no type annotations for these two classes.
FileStore: Callable[..., Store] = dist.FileStore  # type: ignore[attr-defined]
TCPStore: Callable[..., Store] = dist.TCPStore  # type: ignore[attr-defined]

# The function has another name in newer versions of torch.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _tcp_store(link: NodeLink, rank: int, size: int) -> Store:
    return TCPStore(
        link.leader,
        link.store_port,
        size,
        is_master=rank == 0,
        wait_for_workers=False,
        master_listen_fd=link.store_fd if rank == 0 else None,
    )


class TensorGroup:
    """One rank's access to the group of ranks; all ranks make the same calls in the same order.

    Attributes:
        rank: index of this rank in the group.
        size: number of ranks in the group.
    """

    # With pipeline stages, the process group of this stage and its first rank. Otherwise all ranks.
    _where: Mapping[str, Any] = MappingProxyType({})
    _first = 0

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        meeting: Path | NodeLink,
        num_stages: int = 1,
        *,
        only_nccl: bool = False,
    ) -> None:
        """Join the group; returns when all ranks have joined.

        Args:
            rank: index of this rank among the ranks of all pipeline stages.
            size: number of ranks that share each layer; at least 2 unless there are stages.
            device: this rank's device.
            meeting: where the ranks find each other. A file that does not exist yet, the same for
                all ranks; or, with several nodes, the address of rank 0's listening socket.
            num_stages: number of pipeline stages, each with `size` ranks. The group has the ranks
                of this rank's stage.
            only_nccl: never sum in memory that GPUs share.
        """
        self.rank = rank % size
        self.size = size
        num_ranks = size * num_stages
        self._device = device
        # On a single machine, the ranks' sockets are reachable from this machine only.
        interface = "lo" if isinstance(meeting, Path) else interface_of(meeting.host)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if interface is not None:
                os.environ.setdefault(name, interface)
        store = (
            FileStore(str(meeting), num_ranks)
            if isinstance(meeting, Path)
            else _tcp_store(meeting, rank, num_ranks)
        )
        is_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            device_id=device if is_gpu else None,
        )
        self._one_shot: OneShotAllReduce | None = None
        if num_stages > 1:
            firsts = range(0, num_ranks, size)
            groups = [dist.new_group(list(range(first, first + size))) for first in firsts]
            self._where, self._first = {"group": groups[rank // size]}, rank - self.rank
            return
        # The one-shot sum needs memory that all ranks can read, so it works on one machine only.
        if isinstance(meeting, Path) and not only_nccl:
            self._one_shot = make_one_shot(size, device)
        if not all(self.minimum(self._one_shot is not None)):
            self._one_shot = None

    def place(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Return a tensor `[num_rows, width]` to write the input of the next `all_reduce` to.

        `None` if that input may be any tensor.
        """
        return None if self._one_shot is None else self._one_shot.place((num_rows, width), dtype)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, bitwise equal on each; may overwrite `x`."""
        if self._one_shot is not None and self._one_shot.holds(x):
            return self._one_shot(x)
        dist.all_reduce(x, **self._where)
        return x

    def sum_in_order(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks in place, in the order of the ranks, and return it.

        `all_reduce` may choose another order for another number of rows, and so round differently.
        Here the sum of an element is the same in every batch and on each rank.
        """
        parts = x.new_empty(self.size, x.numel())
        _gather(parts.view(-1), x.contiguous().view(-1), **self._where)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return x.copy_(total.view(x.shape))

    def gather_columns(self, x: Tensor) -> Tensor:
        """Concatenate the ranks' tensors `[num_rows, width]` to `[num_rows, size * width]`."""
        num_rows, width = x.shape
        parts = x.new_empty(self.size * num_rows, width)
        _gather(parts, x.contiguous(), **self._where)
        if num_rows == 1:
            return parts.view(1, -1)
        parts = parts.view(self.size, num_rows, width).transpose(0, 1)
        return parts.reshape(num_rows, self.size * width)

    def share(self, x: Tensor) -> Tensor:
        """Overwrite `x` with the `x` of the group's first rank, and return it."""
        dist.broadcast(x, self._first, **self._where)
        return x

    def minimum(self, *values: int) -> list[int]:
        """Return the minimum of each value over the ranks of the group; wait for all of them."""
        return self._minimum(values, **self._where)

    def minimum_of_stages(self, *values: int) -> list[int]:
        """Return the minimum of each value over the ranks of all stages; wait for all of them."""
        return self._minimum(values)

    def _minimum(self, values: Sequence[int], **where: Any) -> list[int]:
        numbers = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN, **where)
        found: list[int] = numbers.tolist()
        return found
