"""Prompt chunks in graphs: pages that come with the step's inputs, tokens that go to the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.executor.batch_rows import BatchRows
from tests.support.engine import TOO_LARGE_SEED
from tests.support.gpu import count_graphs, in_both_precisions, prompt, small_engine
from tests.support.tiny_models import tiny_model

pytestmark = [pytest.mark.also_cpu, in_both_precisions]
NUM_NEW = 12


@pytest.fixture
def num_sent(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many pages were sent by themselves so far."""
    sent = []
    send = BatchRows.send_pages

    def note(rows: BatchRows) -> None:
        sent.append(len(rows.unsent_pages()[0]))
        send(rows)

    monkeypatch.setattr(BatchRows, "send_pages", note)
    return lambda: sum(sent)


@pytest.mark.parametrize(("num_cached", "comes_with_the_step"), [(64, True), (208, False)])
def test_pages_of_a_cached_prefix(
    num_cached: int,
    comes_with_the_step: bool,
    graphs: None,
    num_sent: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = prompt(num_cached, 1) + prompt(5, 2)
    plain = small_engine(tiny_model("llama"), disable_cuda_graph=True)
    expected = plain.generate(ids, NUM_NEW, ignore_eos=True)
    engine = small_engine(tiny_model("llama"))
    engine.generate(ids[:num_cached] + prompt(3, 3), 2, ignore_eos=True)
    counts, before = count_graphs(engine, monkeypatch), num_sent()
    assert engine.generate(ids, NUM_NEW, ignore_eos=True) == expected
    assert engine.cached[max(engine.cached)] == num_cached
    assert counts["prompt"] == 1
    assert (num_sent() == before) == comes_with_the_step


def test_newcomers_beside_others_that_need_a_page(graphs: None) -> None:
    """Rows that decode on into a new page while a prompt is computed, in one graph."""
    engine = small_engine(tiny_model("llama"))
    prompts = [prompt(14 + i % 4, i) for i in range(8)]
    alone = [engine.generate(ids, 30, ignore_eos=True) for ids in prompts]
    for i, ids in enumerate(prompts):
        engine.add(100 + i, ids, 30, ignore_eos=True)
        engine.scheduler.step()
    engine.run()
    assert [engine.tokens[100 + i] for i in range(len(prompts))] == alone


@pytest.mark.parametrize("without_graphs", [False, True])
def test_pages_of_a_request_that_could_not_take_its_row(without_graphs: bool, graphs: None) -> None:
    """Its row's next owner has other pages at the same places."""
    begin, ids = prompt(70, 1), prompt(70, 1) + prompt(5, 3)
    plain = small_engine(tiny_model("llama"), disable_cuda_graph=True)
    expected = plain.generate(ids, NUM_NEW, ignore_eos=True)
    engine = small_engine(tiny_model("llama"), disable_cuda_graph=without_graphs)
    engine.generate(begin, 2, ignore_eos=True)
    engine.add(900, prompt(60, 2), 1, seed=TOO_LARGE_SEED)
    engine.run()
    assert engine.reasons[900].status_code == 500
    assert engine.generate(ids, NUM_NEW, ignore_eos=True) == expected
    assert engine.cached[max(engine.cached)] == 64


@pytest.mark.parametrize(("num_rows", "most"), [(1, 2), (5, 6), (97, 110)])
def test_a_newcomer_beside_rows_has_a_graph(
    num_rows: int, most: int, graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether more or fewer requests may run than sequences fit into the usual graphs."""
    engine = small_engine(tiny_model("llama"), max_running_requests=most)
    newcomer = prompt(20, 0)
    expected = engine.generate(newcomer, NUM_NEW, ignore_eos=True)
    alone = engine.generate(prompt(3, 1), 2 * NUM_NEW, ignore_eos=True)
    for i in range(num_rows):
        engine.add(100 + i, prompt(3, 1 + i), 2 * NUM_NEW, ignore_eos=True)
    while any(len(engine.tokens.get(100 + i, ())) < 3 for i in range(num_rows)):
        engine.scheduler.step()
    counts = count_graphs(engine, monkeypatch)
    engine.add(900, newcomer, NUM_NEW, ignore_eos=True)
    engine.run()
    assert counts["prompt"] == 1
    assert engine.tokens[900] == expected
    assert engine.tokens[100] == alone
