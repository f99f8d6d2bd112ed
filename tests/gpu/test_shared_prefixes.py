"""Decode steps that read the keys of a common beginning once for all who share it."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.executor import cuda_graphs, prefix_groups
from tests.support.engine import InProcessEngine
from tests.support.gpu import prompt, small_engine
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.also_cpu


@pytest.fixture
def eager_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are shared from 32 tokens on."""
    monkeypatch.setattr(prefix_groups, "_MIN_TOKENS", 32)
    monkeypatch.setattr(prefix_groups, "_MIN_SAVED", 1)


def seen_groups(engine: InProcessEngine, patch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Members and length of each group that attention is told of from now on."""
    seen: list[list[tuple[int, int]]] = []
    graphs = engine.runner._graphs
    assert graphs is not None
    attention: Any = graphs._attention
    put = attention.put_prefixes

    def note(groups: list[Any]) -> None:
        seen.append([(len(group.members), group.length) for group in groups])
        put(groups)

    patch.setattr(attention, "put_prefixes", note)
    return seen


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_everyone_gets_the_tokens_of_being_alone(
    name: str, graphs: None, eager_to_share: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tiny_model(name), max_running_requests=16)
    long, short = prompt(150, 1), prompt(70, 2)
    # Two beginnings, one of them with a branch, and prompts that share nothing.
    prompts = [long + prompt(3 + 5 * i, 10 + i) for i in range(5)]
    prompts += [short + prompt(20 + i, 20 + i) for i in range(4)]
    prompts += [short[:33] + prompt(40, 30), *(prompt(90, 31 + i) for i in range(2))]
    counts = [9 + 4 * (i % 5) for i in range(len(prompts))]
    alone = [
        engine.generate(ids, count, ignore_eos=True)
        for ids, count in zip(prompts, counts, strict=True)
    ]
    seen = seen_groups(engine, monkeypatch)
    for turn in range(3):
        first = 1000 * (turn + 1)
        order = range(len(prompts)) if turn < 2 else reversed(range(len(prompts)))
        for place, i in enumerate(order):
            engine.add(first + i, prompts[i], counts[i], ignore_eos=True)
            # In the second turn they join a batch that is running, in rows that others have left.
            for _ in range(2 * (turn == 1) * (place > 7)):
                engine.scheduler.step()
        engine.run()
        assert [engine.tokens[first + i] for i in range(len(prompts))] == alone
    told = [groups for groups in seen if groups]
    assert any(sorted(members for members, _ in groups) == [4, 5] for groups in told)
    assert all(length in (32, 64, 144) for groups in told for _, length in groups)
    # Once for a batch, not once for a step.
    assert len(told) < 25


def test_a_batch_that_has_no_graph_for_it_computes_as_usual(
    graphs: None, eager_to_share: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tiny_model("llama"), max_running_requests=16)
    decode = engine.runner._graphs
    assert decode is not None
    # The largest one, so that kernels compile at start.
    assert sorted(decode._sharing) == [16]
    begin = prompt(150, 1)
    prompts = [begin + prompt(9, 10 + i) for i in range(9)]
    alone = [engine.generate(ids, 12, ignore_eos=True) for ids in prompts]
    seen = seen_groups(engine, monkeypatch)

    def together(first: int) -> list[list[int]]:
        for i, ids in enumerate(prompts):
            engine.add(first + i, ids, 12, ignore_eos=True)
        engine.run()
        return [engine.tokens[first + i] for i in range(len(prompts))]

    decode._refused.add((12, True))
    assert together(100) == alone
    assert not any(seen)
    decode._refused.clear()
    assert together(200) == alone
    assert sorted(decode._sharing) == [12, 16]
    assert any(seen)


def test_graphs_can_be_captured_again(graphs: None, eager_to_share: None) -> None:
    engine = small_engine(tiny_model("llama"), max_running_requests=16)
    decode = engine.runner._graphs
    assert decode is not None
    begin = prompt(150, 1)
    prompts = [begin + prompt(9, 10 + i) for i in range(9)]
    alone = [engine.generate(ids, 12, ignore_eos=True) for ids in prompts]
    for turn in (1, 2):
        engine.runner.drop_graphs()
        engine.runner.capture_graphs(lambda fraction: None)
        assert sorted(decode._sharing) == [16]
        for i, ids in enumerate(prompts):
            engine.add(100 * turn + i, ids, 12, ignore_eos=True)
        engine.run()
        assert [engine.tokens[100 * turn + i] for i in range(len(prompts))] == alone


def test_ranks_of_a_layer_capture_all_of_them_at_start(
    graphs: None, eager_to_share: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "FIRST_BATCHES", 4)
    engine = small_engine(tiny_model("llama"), max_running_requests=16)
    decode = engine.runner._graphs
    assert decode is not None
    begin = prompt(150, 1)
    prompts = [begin + prompt(9, 10 + i) for i in range(9)]
    alone = [engine.generate(ids, 12, ignore_eos=True) for ids in prompts]
    # What it is told by its group, if it is the only one.
    decode._share = lambda token_ids: token_ids
    engine.runner.drop_graphs()
    engine.runner.capture_graphs(lambda fraction: None)
    assert sorted(decode._sharing) == [8, 12, 16]
    seen = seen_groups(engine, monkeypatch)
    monkeypatch.setattr(cuda_graphs, "capture_graph", None)
    for i, ids in enumerate(prompts):
        engine.add(100 + i, ids, 12, ignore_eos=True)
    engine.run()
    assert [engine.tokens[100 + i] for i in range(len(prompts))] == alone
    assert any(seen)


def test_models_whose_layers_all_have_a_window_share_nothing(
    graphs: None, eager_to_share: None
) -> None:
    engine = small_engine(tiny_model("mistral_window"), max_running_requests=16)
    decode = engine.runner._graphs
    assert decode is not None
    assert decode._prefixes is None
    assert not decode._sharing
