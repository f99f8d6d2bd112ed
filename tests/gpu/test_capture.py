"""Other Python work does not spoil the capture of a graph."""

from __future__ import annotations

import gc

import torch

from runtime.executor.graph_capture import GraphPool
from tests.support.gpu import DEVICE, on_gpu

# More than the collector lets come before it looks at what is new.
NUM_NEW = 10_000


@on_gpu
def test_the_collector_waits_for_the_end() -> None:
    x = torch.zeros(4, device=DEVICE)
    before = GraphPool()
    graphs = [before.capture(lambda: x.add_(1)) for _ in range(2)]
    x.zero_()
    kept: list[object] = []

    def work() -> None:
        # Once before the capture and once in it, as an engine that went may leave a graph.
        garbage: list[object] = [graphs.pop()]
        garbage.append(garbage)
        del garbage
        kept.extend([[] for _ in range(NUM_NEW)])
        x.add_(1)

    graph = GraphPool().capture(work)
    assert gc.isenabled()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    # The run ahead of the capture, and three launches.
    assert x.tolist() == [4.0] * 4
