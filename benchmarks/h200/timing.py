"""Times device work through CUDA graphs: launch gaps stay out, buffers rotate past the cache."""

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Return the median microseconds of one call, all of `calls` being captured in one graph.

    The calls should differ in the memory that they touch, as a model's layers do.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Threads of others may look at their events meanwhile: NCCL's does.
    # On the same stream, whose scratch memory the kernels have by now.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times) * 1e3 / len(calls)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `want`, in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())
