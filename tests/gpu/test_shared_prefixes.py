"""Decode steps read the keys of a shared prefix once for all rows that share it."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.executor import graph_runner as graph_runner_module
from runtime.executor import prefix_groups
from runtime.executor.graph_buckets import Bucket
from runtime.executor.graph_runner import GraphRunner
from tests.support.engine import InProcessEngine
from tests.support.gpu import graph_runner, prompt, small_engine
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.also_cpu


@pytest.fixture
def eager_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are shared from 32 tokens on."""
    monkeypatch.setattr(prefix_groups, "_MIN_TOKENS", 32)
    monkeypatch.setattr(prefix_groups, "_MIN_SAVED", 1)


def shared_sizes(graphs: GraphRunner) -> list[int]:
    """Batch sizes that have a graph for shared prefixes."""
    return [bucket.num_seqs for bucket in graphs.captured if bucket.kind == "shared"]


def seen_groups(engine: InProcessEngine, patch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Members and length of each group that attention is told of from now on."""
    seen: list[list[tuple[int, int]]] = []
    attention: Any = graph_runner(engine)._attention
    put = attention.put_prefixes

    def note(groups: list[Any]) -> None:
        seen.append([(len(group.members), group.length) for group in groups])
        put(groups)

    patch.setattr(attention, "put_prefixes", note)
    return seen


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
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


class Sharers:
    """An engine, nine prompts that begin alike, and what each gives by itself."""

    def __init__(self) -> None:
        self.engine = small_engine(tiny_model("llama"), max_running_requests=16)
        self.graphs = graph_runner(self.engine)
        begin = prompt(150, 1)
        self.prompts = [begin + prompt(9, 10 + i) for i in range(9)]
        self.alone = [self.engine.generate(ids, 12, ignore_eos=True) for ids in self.prompts]

    def capture_again(self) -> None:
        self.engine.runner.drop_graphs()
        self.engine.runner.capture_graphs(lambda fraction: None)

    def together(self) -> list[list[int]]:
        first = max(self.engine.tokens) + 1
        for i, ids in enumerate(self.prompts):
            self.engine.add(first + i, ids, 12, ignore_eos=True)
        self.engine.run()
        return [self.engine.tokens[first + i] for i in range(len(self.prompts))]


def test_a_batch_that_has_no_graph_for_it_computes_as_usual(
    graphs: None, eager_to_share: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharers = Sharers()
    runner = sharers.graphs
    # The largest one, so that kernels compile at start.
    assert shared_sizes(runner) == [16]
    seen = seen_groups(sharers.engine, monkeypatch)
    runner._refused.add(Bucket(12, 12, "shared"))
    assert sharers.together() == sharers.alone
    assert not any(seen)
    runner._refused.clear()
    assert sharers.together() == sharers.alone
    assert shared_sizes(runner) == [12, 16]
    assert any(seen)


def test_graphs_can_be_captured_again(graphs: None, eager_to_share: None) -> None:
    sharers = Sharers()
    for _ in range(2):
        sharers.capture_again()
        assert shared_sizes(sharers.graphs) == [16]
        assert sharers.together() == sharers.alone


def test_ranks_of_a_layer_capture_all_of_them_at_start(
    graphs: None, eager_to_share: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_runner_module, "FIRST_BATCHES", 4)
    sharers = Sharers()
    # What it is told by its group, if it is the only one.
    sharers.graphs._share = lambda token_ids: token_ids
    sharers.capture_again()
    assert shared_sizes(sharers.graphs) == [8, 12, 16]
    seen = seen_groups(sharers.engine, monkeypatch)
    monkeypatch.setattr(sharers.graphs._pool, "capture", None)
    assert sharers.together() == sharers.alone
    assert any(seen)


def test_models_whose_layers_all_have_a_window_share_nothing(
    graphs: None, eager_to_share: None
) -> None:
    engine = small_engine(tiny_model("mistral_window"), max_running_requests=16)
    runner = graph_runner(engine)
    assert runner._prefixes is None
    assert not shared_sizes(runner)
