"""Waiting for a step that the device computes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.executor.model_runner import Computed, PendingStep
from runtime.step.step_plan import StepPlan


class Event:
    """Replaces `torch.cuda.Event`; records the calls."""

    calls: list[str]

    def record(self) -> None:
        Event.calls.append("record")

    def synchronize(self) -> None:
        Event.calls.append("synchronize")


def plan(num_seqs: int, *, samples: bool) -> StepPlan:
    lengths = np.ones(num_seqs, dtype=np.int64)
    return StepPlan(
        rows=np.arange(num_seqs),
        num_decodes=num_seqs if samples else 0,
        start_lens=lengths,
        query_lens=lengths,
        chunk_tokens=np.empty(0, dtype=np.int32),
        samples=np.full(num_seqs, samples),
    )


@pytest.mark.parametrize("samples", [False, True])
def test_every_step_on_a_gpu_is_waited_for(samples: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    Event.calls = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    tokens = np.array([7, 8]) if samples else None
    pending = PendingStep(
        plan(2, samples=samples), Computed(host_tokens=tokens), {}, torch.device("cuda")
    )
    assert Event.calls == ["record"]
    result = pending.wait()
    assert Event.calls == ["record", "synchronize"]
    assert result.token_ids.tolist() == ([7, 8] if samples else [])


def test_tokens_survive_the_writes_of_later_steps() -> None:
    line = np.array([7, -1])
    result = PendingStep(
        plan(2, samples=True), Computed(host_tokens=line), {}, torch.device("cpu")
    ).wait()
    line[:] = 0
    assert result.token_ids.tolist() == [7, -1]
    assert list(result.failed) == [1], "the second row has no number"
