"""The sequences of a failed step, computed one after the other."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime.executor import model_runner
from runtime.executor.model_runner import Computed, ModelRunner
from runtime.step.step_plan import StepPlan


@pytest.mark.parametrize("bad", [(), (1,), (1, 2), (0, 1, 2, 3)], ids=str)
def test_each_sequence_starts_after_the_previous_one_is_done(
    bad: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after one that failed after its launches, which read host buffers that are reused."""
    num_seqs = 4
    events: list[Any] = []

    def compute(plan: StepPlan, masks: None, *, with_graphs: bool) -> Computed:
        assert not with_graphs
        row = int(plan.rows[0])
        events.append(row)
        if row in bad:
            raise torch.OutOfMemoryError("planted")
        return Computed(torch.tensor([10 + row]))

    runner = object.__new__(ModelRunner)
    monkeypatch.setattr(runner, "_rows", SimpleNamespace(device=torch.device("cuda")), False)
    monkeypatch.setattr(runner, "_compute", compute)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    monkeypatch.setattr(model_runner, "PendingStep", lambda *parts, **_: parts)
    plan = StepPlan(
        rows=np.arange(num_seqs),
        num_decodes=num_seqs,
        start_lens=np.full(num_seqs, 5),
        query_lens=np.ones(num_seqs, dtype=np.int64),
        chunk_tokens=np.empty(0, dtype=np.int32),
        samples=np.ones(num_seqs, dtype=bool),
    )
    _, computed, failed, _ = runner._compute_each(plan, None, {})  # type: ignore[misc]
    launched = [place for place, event in enumerate(events) if event != "wait"]
    assert [events[place] for place in launched] == list(range(num_seqs))
    for one, following in itertools.pairwise(launched):
        assert "wait" in events[one:following]
    assert set(failed) == set(bad)
    expected = [0 if row in bad else 10 + row for row in range(num_seqs)]
    assert computed.token_ids.tolist() == expected
