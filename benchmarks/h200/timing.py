"""Times device work in CUDA graphs, so that the host's gaps between launches do not count."""

import statistics
from collections.abc import Callable, Sequence

import torch


def graph_us(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Return the median microseconds of one call; one graph holds all `calls`.

    The calls should touch different memory, as a model's layers do, so that the data are not in the
    L2 cache.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Threads of libraries, such as NCCL's, may query their events during the capture, so the error
    # mode is "thread_local". The capture uses the stream of the first calls, where the kernels have
    # their scratch memory by now.
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
    """Return the norm of the difference divided by the norm of `want`, in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())
