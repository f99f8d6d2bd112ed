"""Capturing a piece of device work as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch it once more; waits for nothing."""


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

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` once, so that kernels compile and libraries set themselves up; capture it."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                work()
        finally:
            # What was launched of a run that failed still uses the kernels' shared memory.
            current.wait_stream(self.stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # It would spoil the capture by what it frees: graphs and memory of an engine before.
        collects = gc.isenabled()
        gc.disable()
        try:
            # NCCL's watchdog asks for events of the warm-up on a thread of its own meanwhile.
            with torch.cuda.graph(
                graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local"
            ):
                work()
        finally:
            # torch does not put it back where a capture cannot even end.
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()
        return graph
