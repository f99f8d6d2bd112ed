"""Graphs that are captured in a running engine, when a batch of their size comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.executor import graph_runner as graph_runner_module
from tests.support.gpu import (
    count_graphs,
    graph_runner,
    in_both_precisions,
    prompt,
    small_engine,
)
from tests.support.tiny_models import tiny_model


@pytest.mark.also_cpu
@in_both_precisions
def test_large_batches_get_their_graph_when_they_come(
    graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner_module, "FIRST_BATCHES", 4)
    engine = small_engine(tiny_model("llama"), max_running_requests=16)
    runner = graph_runner(engine)

    def sizes() -> list[int]:
        return [each.num_seqs for each in runner.captured if each.kind == "decode"]

    assert sizes() == [1, 2, 4]
    alone = [engine.generate(prompt(9, i), 12, ignore_eos=True) for i in range(15)]

    def together(first: int, count: int) -> list[list[int]]:
        for i in range(count):
            engine.add(first + i, prompt(9, i), 12, ignore_eos=True)
        engine.run()
        return [engine.tokens[first + i] for i in range(count)]

    counts = count_graphs(engine, monkeypatch)
    assert together(100, 7) == alone[:7]
    assert sizes() == [1, 2, 4, 8]
    assert counts["decode"] >= 10
    tried = []

    def fail(work: Any) -> Any:
        tried.append(work)
        # Some of it was done: the device has counted a line of inputs that the host has not.
        work()
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as until_then:
        until_then.setattr(runner._pool, "capture", fail)
        assert together(200, 11) == alone[:11]
        assert len(tried) == 1, "tried again at each step"
    assert together(300, 15) == alone
    assert sizes() == [1, 2, 4, 8, 16]
