"""Captures device work as a CUDA graph."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None:
        """Launch the work once more, without waiting."""


class GraphPool:
    """The resources for one runner's graphs: a memory pool, and one stream for all.

    cuBLAS has a workspace per stream, 32 MiB on a Hopper GPU. All graphs on one stream share it,
    and it does not come from the graphs' pool. The stream is not shared with other runners, because
    newer versions of torch free the workspace when a graph captured there is destroyed.
    """

    def __init__(self) -> None:
        """Create a stream on the current device."""
        self.stream = torch.cuda.Stream()
        self.renew()

    def renew(self) -> None:
        """Start with an empty pool. All graphs captured here before must have been destroyed."""
        # torch does not export the type.
        self.handle: Any = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Run `work` once, to compile kernels and initialise libraries, then capture it."""
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                work()
        finally:
            # Work launched by a failed run still uses the kernels' shared memory.
            current.wait_stream(self.stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Garbage collection may free an earlier engine's graphs and memory and spoil the capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            # During the capture, NCCL's watchdog queries events of the warm-up on another thread.
            with torch.cuda.graph(
                graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local"
            ):
                work()
        finally:
            # torch does not restore the stream if a capture fails while ending.
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()
        return graph
