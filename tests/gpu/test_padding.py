"""Graphs that are larger than their step: values in padding do not reach any request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.executor.graph_capture import Graph
from tests.support.engine import InProcessEngine
from tests.support.gpu import (
    DEVICE,
    answers,
    assert_same,
    graph_runner,
    on_gpu,
    small_engine,
)
from tests.support.tiny_models import tiny_model


class _Memory:
    """Device memory by its address, as torch takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def poison(engine: InProcessEngine) -> Callable[[], None]:
    """What fills all memory of the graphs, which each replay writes again, with NaN and -1."""
    runner = graph_runner(engine)
    if DEVICE == "cpu":
        graphs: list[Any] = list(runner._graphs.values())
        floats = [each for graph in graphs for each in graph.made if each.is_floating_point()]
        assert floats

        def fill() -> None:
            for each in floats:
                each.fill_(float("nan"))

        return fill
    handle = tuple(runner._pool.handle)
    segments = [
        _Memory(segment["address"], segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == handle
    ]
    assert segments, "the graphs have no memory of their own"
    pieces = [torch.as_tensor(segment, device="cuda") for segment in segments]

    def fill_all() -> None:
        for piece in pieces:
            # In every floating type all ones are a NaN.
            piece.fill_(255)

    return fill_all


@pytest.mark.also_cpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"dtype": "bfloat16"}, marks=on_gpu),
        pytest.param({"dtype": "bfloat16", "deterministic": True}, marks=on_gpu),
    ],
    ids=["float32", "bfloat16", "bfloat16, deterministic"],
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_nobody_reads_what_a_graph_left(
    name: str, options: dict[str, Any], graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No cache: the same load is computed by the same steps twice.
    engine = small_engine(tiny_model(name), disable_radix_cache=True, **options)
    first = answers(engine)
    again = answers(engine)
    assert_same(again, first)
    fill = poison(engine)
    # Page 0 belongs to nobody: rows that pad a batch read and write it. The attention that is
    # recorded on a CPU multiplies what it does not see by 0.
    with torch.inference_mode():
        for layer in engine.runner._kv if DEVICE == "cuda" else ():
            layer.k[0].fill_(float("nan"))
            layer.v[0].fill_(float("nan"))
    num_replays = 0

    def poisoned(graph: Graph) -> Graph:
        replay = graph.replay

        class Poisoned:
            def replay(self) -> None:
                nonlocal num_replays
                num_replays += 1
                fill()
                replay()

        return Poisoned()

    runner = graph_runner(engine)
    for bucket, graph in list(runner._graphs.items()):
        monkeypatch.setitem(runner._graphs, bucket, poisoned(graph))
    assert_same(answers(engine), first)
    assert num_replays > 20
