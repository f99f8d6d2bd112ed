"""Capturing a piece of device work as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Host buffers in turn: with two steps in flight the third oldest is no longer being read.
NUM_HOST_BUFFERS = 4


class GraphPool:
    """Where the graphs of one runner are captured: a pool of memory, and one stream for all.

    cuBLAS works in memory that belongs to a stream, 32 MiB on a Hopper GPU. On one stream all
    graphs share it, it is not taken from the graphs' own pool, and no other runner's graphs use
    it: newer versions of torch free it when a graph that was captured there goes.
    """

    def __init__(self) -> None:
        """Take a stream of the current device."""
        self.stream = torch.cuda.Stream()
        self.renew()

    def renew(self) -> None:
        """Begin with empty memory: every graph captured here before is gone."""
        # torch does not export the type.
        self.handle: Any = torch.cuda.graph_pool_handle()


def capture_graph(work: Callable[[], None], pool: GraphPool) -> torch.cuda.CUDAGraph:
    """Run `work` once, so that kernels compile and libraries set themselves up, then capture it."""
    current = torch.cuda.current_stream()
    pool.stream.wait_stream(current)
    try:
        with torch.cuda.stream(pool.stream):
            work()
    finally:
        # What was launched of a run that failed still uses the kernels' shared memory.
        current.wait_stream(pool.stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # NCCL's watchdog asks for events of the warm-up on a thread of its own meanwhile.
        with torch.cuda.graph(
            graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"
        ):
            work()
    finally:
        # torch does not put it back where a capture cannot even end.
        torch.cuda.set_stream(current)
    return graph


class HostBuffers:
    """Lines of pinned int64 numbers, used in turn as a graph's inputs.

    Attributes:
        lines: `[NUM_HOST_BUFFERS, size]`.
        turn: the line of the latest step.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Make the lines, each of `size` numbers, for graphs on `device`."""
        self.lines = host_numbers(device, NUM_HOST_BUFFERS, size)
        self.turn = 0

    def next(self) -> torch.Tensor:
        """The line that was read the longest ago, which is now the latest."""
        self.turn = self.following
        return self.lines[self.turn]

    @property
    def following(self) -> int:
        """Which line `next` gives."""
        return (self.turn + 1) % NUM_HOST_BUFFERS

    def free(self) -> list[torch.Tensor]:
        """The lines of no step under way: all but the latest two."""
        return [
            self.lines[(self.turn + i) % NUM_HOST_BUFFERS] for i in range(1, NUM_HOST_BUFFERS - 1)
        ]


def host_numbers(device: torch.device, *shape: int) -> torch.Tensor:
    """Return int64 zeros on the host, pinned where `device` is a GPU, which then reaches them."""
    return torch.zeros(*shape, dtype=torch.int64, pin_memory=device.type == "cuda")
