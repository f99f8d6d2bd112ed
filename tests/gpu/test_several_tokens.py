"""Rows that decode several tokens in one step: the first is on the device, the others are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from runtime.executor.graph_buckets import Bucket
from runtime.requests.request_spec import RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.step.step_plan import PageUpdate, RowJoin, StepPlan
from tests.support.engine import InProcessEngine
from tests.support.gpu import graph_runner, in_both_precisions, prompt, small_engine
from tests.support.tiny_models import tiny_model

pytestmark = [pytest.mark.also_cpu, in_both_precisions]
PAGE = 16
# Pages of each row, more than it needs.
NUM_PAGES = 6
# One ends right at the end of a page, one a token before.
PROMPTS = [prompt(9, 1), prompt(15, 2), prompt(16, 3), prompt(37, 4)]
NUM_NEW = 9


def pages(row: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(1 + row * NUM_PAGES, 1 + (row + 1) * NUM_PAGES, dtype=np.int32)


class Rows:
    """Rows 0, 1, ... of an idle engine's runner, and how many keys each has."""

    def __init__(self, engine: InProcessEngine) -> None:
        self._runner = engine.runner
        self.lengths = [0] * len(PROMPTS)

    def step(
        self, decodes: dict[int, Sequence[int]], prompts: dict[int, list[int]] | None = None
    ) -> list[int]:
        """Compute a step; the token of each row.

        Args:
            decodes: by row, the tokens behind the one that the device has.
            prompts: by row, whole ones of rows that join.
        """
        prompts = prompts or {}
        rows = [*decodes, *prompts]
        known = [*decodes.values(), *prompts.values()]
        counts = [1 + len(each) for each in decodes.values()] + [*map(len, prompts.values())]
        starts = [self.lengths[row] for row in decodes] + [0] * len(prompts)
        # As the planner says it: a page that a decoding row begins comes with the step, those of
        # prompts, and further ones, ahead of it.
        updates = [
            PageUpdate(row, 0, pages(row)[: -(-len(prompts[row]) // PAGE)]) for row in prompts
        ]
        new_pages = np.zeros(len(decodes), dtype=np.int32)
        for i, row in enumerate(decodes):
            have, need = -(-starts[i] // PAGE), -(-(starts[i] + counts[i]) // PAGE)
            if need > have:
                new_pages[i] = pages(row)[have]
                updates.append(PageUpdate(row, have + 1, pages(row)[have + 1 : need]))
        for row, start, count in zip(rows, starts, counts, strict=True):
            self.lengths[row] = start + count
        plan = StepPlan(
            rows=np.array(rows),
            num_decodes=len(decodes),
            start_lens=np.array(starts),
            query_lens=np.array(counts),
            chunk_tokens=np.array([token for each in known for token in each], dtype=np.int32),
            samples=np.ones(len(rows), dtype=bool),
            joins=[join(row, len(prompts[row])) for row in prompts],
            page_updates=updates,
            new_pages=new_pages if new_pages.any() else None,
        )
        result = self._runner.launch(plan).wait()
        assert not result.failed
        return result.token_ids.tolist()

    def begin(self) -> list[int]:
        """Compute all prompts."""
        return self.step({}, dict(enumerate(PROMPTS)))


def join(row: int, num_prompt: int) -> RowJoin:
    sampling = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0)
    return RowJoin(row, RowSpec(sampling=sampling), num_prompt, np.empty(0, dtype=np.int32))


@pytest.fixture(params=["graphs", "eager"])
def engine(request: pytest.FixtureRequest, graphs: None) -> InProcessEngine:
    return small_engine(tiny_model("llama"), disable_cuda_graph=request.param == "eager")


def one_by_one(engine: InProcessEngine) -> list[list[int]]:
    """The tokens of each row when every step gives one."""
    rows = Rows(engine)
    found = [rows.begin()]
    found += [rows.step({row: [] for row in range(len(PROMPTS))}) for _ in range(NUM_NEW - 1)]
    return [list(tokens) for tokens in zip(*found, strict=True)]


def test_known_tokens_give_what_single_steps_give(engine: InProcessEngine) -> None:
    expected = one_by_one(engine)
    rows = Rows(engine)
    assert rows.begin() == [tokens[0] for tokens in expected]
    # Row 0 goes on token by token; the others bring 1, 3 and 5 known ones, over pages' ends.
    known = {row: expected[row][1 : 2 * row] for row in range(4)}
    assert [len(each) for each in known.values()] == [0, 1, 3, 5]
    at = [1 + len(known[row]) for row in range(4)]
    assert rows.step(known) == [expected[row][at[row]] for row in range(4)]
    # Their keys are in their places: what follows reads them.
    for _ in range(2):
        at = [place + 1 for place in at]
        found = rows.step({row: [] for row in range(4)})
        assert found == [expected[row][at[row]] for row in range(4)]


def test_beside_a_prompt_that_joins(engine: InProcessEngine) -> None:
    expected = one_by_one(engine)
    rows = Rows(engine)
    rows.step({}, {row: PROMPTS[row] for row in (0, 1, 2)})
    found = rows.step({0: [], 2: expected[2][1:5], 1: expected[1][1:3]}, {3: PROMPTS[3]})
    assert found == [expected[0][1], expected[2][5], expected[1][3], expected[3][0]]
    found = rows.step({row: [] for row in range(4)})
    assert found == [expected[0][2], expected[1][4], expected[2][6], expected[3][1]]


def test_such_steps_run_in_the_graphs_of_prompts(
    graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tiny_model("llama"))
    expected = one_by_one(engine)
    runner = graph_runner(engine)
    run, kinds = runner.run, []

    def note(bucket: Bucket, plan: StepPlan, **options: Any) -> Any:
        kinds.append(bucket.kind)
        return run(bucket, plan, **options)

    monkeypatch.setattr(runner, "run", note)
    rows = Rows(engine)
    rows.begin()
    rows.step({0: [], 1: expected[1][1:4]})
    rows.step({0: [], 1: []})
    assert kinds == ["prompts", "mixed", "decode"]


def test_a_step_of_several_tokens_that_fails_is_tried_row_by_row(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one_by_one(engine)
    rows = Rows(engine)
    rows.begin()
    compute, failures = engine.runner._compute, []

    def fail_once(plan: StepPlan, *args: Any, **options: Any) -> Any:
        # Its inputs have been read, and overwritten by its tokens.
        result = compute(plan, *args, **options)
        if not failures:
            failures.append(plan)
            raise RuntimeError("planted")
        return result

    monkeypatch.setattr(engine.runner, "_compute", fail_once)
    known = {row: expected[row][1 : 1 + row] for row in range(4)}
    assert rows.step(known) == [expected[row][1 + row] for row in range(4)]
    assert len(failures) == 1
