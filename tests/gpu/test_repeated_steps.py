"""A step that fails once its tokens are chosen is repeated with the inputs that it had."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from runtime.extras.logprobs import device as logprobs
from runtime.extras.logprobs.positions import LogprobSpec
from tests.support.gpu import graph_runner, in_both_precisions, prompt, small_engine
from tests.support.tiny_models import tiny_model

pytestmark = [pytest.mark.also_cpu, in_both_precisions]

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"frequency_penalty": 0.7},
    {"temperature": 0.9, "top_k": 9, "seed": 4},
]


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("newcomer", [False, True], ids=["decode", "mixed"])
def test_nobody_gets_other_tokens(
    graphs: None, eager: bool, newcomer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tiny_model("llama"), disable_cuda_graph=eager)
    prompts = [prompt(9 + i, i) for i in range(len(KINDS))]
    alone = [
        engine.generate(ids, 20, ignore_eos=True, **kind)
        for ids, kind in zip(prompts, KINDS, strict=True)
    ]
    gather, failures = logprobs.gather_logprobs, []

    def fail_once(logits: torch.Tensor, *args: Any) -> Any:
        if not failures and len(engine.tokens.get(100, ())) >= 8:
            failures.append(len(logits))
            if newcomer:
                assert 200 in engine.scheduler._requests
            raise torch.OutOfMemoryError("planted")
        return gather(logits, *args)

    monkeypatch.setattr(logprobs, "gather_logprobs", fail_once)
    for i, (ids, kind) in enumerate(zip(prompts, KINDS, strict=True)):
        engine.add(100 + i, ids, 20, LogprobSpec() if i % 2 else None, ignore_eos=True, **kind)
    while len(engine.tokens.get(100, [])) < 8:
        engine.scheduler.step()
    if newcomer:
        engine.add(200, prompt(30, 9), 5, ignore_eos=True)
    engine.run()
    assert failures == [2], "the step did not fail as planned"
    assert [engine.tokens[100 + i] for i in range(len(KINDS))] == alone
    assert all(engine.reasons[100 + i].type == "length" for i in range(len(KINDS)))


@pytest.mark.parametrize("times", [1, 3])
def test_a_graph_that_is_not_launched_reads_no_inputs(graphs: None, times: int) -> None:
    """The steps after it read their own: host and device count alike which are next."""
    engine = small_engine(tiny_model("llama"))
    prompts = [prompt(9 + i, i) for i in range(4)]
    alone = [engine.generate(ids, 30, ignore_eos=True) for ids in prompts]
    graphs_now = graph_runner(engine)._graphs
    failures: list[int] = []

    class Unreliable:
        def __init__(self, replay: Callable[[], None]) -> None:
            self._replay = replay

        def replay(self) -> None:
            if len(failures) < times and len(engine.tokens.get(100, ())) >= 8:
                failures.append(1)
                raise torch.OutOfMemoryError("planted")
            self._replay()

    for bucket, graph in list(graphs_now.items()):
        graphs_now[bucket] = Unreliable(graph.replay)
    for i, ids in enumerate(prompts):
        engine.add(100 + i, ids, 30, ignore_eos=True)
    engine.run()
    assert len(failures) == times
    assert [engine.tokens[100 + i] for i in range(4)] == alone
