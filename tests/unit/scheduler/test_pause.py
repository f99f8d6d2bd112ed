"""Pauses and updates between two steps, with a step in flight: no token is lost or made twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.ipc.weight_messages import (
    ContinueGeneration,
    InvalidateCache,
    LoadFolder,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    WeightCall,
)
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import other_weights, tiny_model

PROMPT = list(range(3, 60))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("retract", [False, True])
def test_a_pause_does_not_change_outputs(overlap: bool, retract: bool) -> None:
    engine = InProcessEngine(tiny_model("qwen3"), overlap=overlap, chunked_prefill_size=16)
    expected = engine.generate(PROMPT, 40, ignore_eos=True)
    for steps in (1, 2, 5, 20):
        numbers = [max(engine.tokens) + 1 + index for index in range(3)]
        for number in numbers:
            engine.add(number, PROMPT, 40, ignore_eos=True)
        for _ in range(steps):
            engine.scheduler.step()
        engine.scheduler.receive([PauseGeneration(1, retract)])
        engine.scheduler.rest()
        assert engine.scheduler.has_work
        assert not engine.scheduler.can_step
        assert (engine.shared["num_retracted_reqs"] > 0) == retract
        engine.scheduler.receive([InvalidateCache(2), ContinueGeneration(3)])
        assert engine.scheduler.can_step
        engine.run()
        assert engine.shared["num_retracted_reqs"] == 0
        assert [engine.tokens[number] for number in numbers] == [expected] * 3


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_change_between_two_steps(tmp_path: Path, overlap: bool) -> None:
    engine = InProcessEngine(tiny_model("qwen3"), overlap=overlap)
    old = engine.generate(PROMPT, 30, ignore_eos=True, temperature=1.0)
    folder = other_weights("qwen3", tmp_path / "other")
    engine.add(50, PROMPT, 30, ignore_eos=True, temperature=1.0)
    for _ in range(10):
        engine.scheduler.step()
    engine.scheduler.receive([WeightCall(1, LoadFolder(str(folder)), True)])
    before = len(engine.tokens[50])
    assert before >= 9
    engine.run()
    # The same beginning, then other weights with the old keys.
    assert engine.tokens[50][:before] == old[:before]
    assert engine.tokens[50] != old
    engine.add(51, PROMPT, 30, ignore_eos=True, temperature=1.0)
    engine.run()
    assert engine.cached[51] == 0
    fresh = InProcessEngine(folder).generate(PROMPT, 30, ignore_eos=True, temperature=1.0)
    assert engine.tokens[51] == fresh


def test_memory_stays_while_a_request_runs() -> None:
    engine = InProcessEngine(tiny_model("qwen3"))
    engine.add(1, PROMPT, 30, ignore_eos=True)
    engine.scheduler.step()
    engine.scheduler.receive([WeightCall(1, ReleaseMemory([]))])
    assert engine.scheduler.can_step
    engine.run()
    engine.scheduler.receive([WeightCall(2, ReleaseMemory([]))])
    engine.add(2, PROMPT, 30, ignore_eos=True)
    assert not engine.scheduler.can_step, "nothing may compute without memory"
    engine.scheduler.receive([WeightCall(3, ResumeMemory([]))])
    engine.run()
    assert engine.tokens[2] == engine.tokens[1]
    assert engine.cached[2] == 0
