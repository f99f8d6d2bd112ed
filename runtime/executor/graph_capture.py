"""Captures work on a GPU as a CUDA graph, which can be launched again at little cost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Graph(Protocol):
    """Work on a GPU that was captured."""

    def replay(self) -> None:
        """Launch the captured work once more, without waiting for its end."""


class GraphPool:
    """The resources that all graphs of one runner share: a memory pool and a stream.

    cuBLAS allocates a workspace for each stream, 32 MiB on a Hopper GPU, outside of the pool. All
    graphs of a runner are captured on one stream, so they share this workspace. Different runners
    use different streams, because newer versions of torch free a stream's workspace when a graph
    that was captured on it is destroyed.
    """

    def __init__(self) -> None:
        """Create a stream and an empty memory pool on the current device."""
        self.stream = torch.cuda.Stream()
        self.renew()

    def renew(self) -> None:
        """Start again with an empty memory pool; all earlier graphs must have been destroyed."""
        # torch does not export the type.
        self.handle: Any = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture the kernels that `work` launches, and return the graph.

        `work` runs once before the capture, to compile kernels and initialize libraries. It runs
        a second time to be captured.
        """
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                work()
        finally:
            # The current stream waits after a failed run too, because launched work may still use
            # the kernels' shared memory.
            current.wait_stream(self.stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Garbage collection could free graphs and memory of an earlier engine, which would break
        # the capture.
        collects = gc.isenabled()
        gc.disable()
        try:
            # NCCL's watchdog thread queries events during the capture, which is allowed in this
            # mode only.
            with torch.cuda.graph(
                graph, pool=self.handle, stream=self.stream, capture_error_mode="thread_local"
            ):
                work()
        finally:
            # If a capture fails at its end, torch does not restore the current stream.
            torch.cuda.set_stream(current)
            if collects:
                gc.enable()
        return graph
