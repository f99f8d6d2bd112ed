"""The recorder of expert use beside steps that it must not hurt."""

from __future__ import annotations

from typing import Any

from runtime.executor.expert_recorder import ExpertRecorder
from runtime.executor.step_plan import StepPlan
from runtime.extras.pooled.parts import VECTOR
from runtime.models.layers.expert_counts import ExpertCounts
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model


def recording(**options: Any) -> InProcessEngine:
    folder = tiny_model("qwen2_moe")
    engine = InProcessEngine(folder, expert_recorder_mode="per_token", **options)
    engine.runner.recorder.start()
    return engine


def test_a_step_that_cannot_be_kept_ends_the_record_alone(caplog) -> None:
    engine = recording()

    class Failing(ExpertRecorder):
        def end_step(self, plan: StepPlan) -> None:
            raise MemoryError("planted")

    counts = ExpertCounts(3, 6, 2, [1, 2])
    engine.runner.recorder = Failing("stat", 10, 0, counts)
    engine.runner.recorder.start()
    assert len(engine.generate([5, 6, 7], 4, ignore_eos=True)) == 4
    assert not engine.runner.recorder.is_on
    assert "recorded no more" in caplog.text


def test_vectors_of_texts_are_recorded_too() -> None:
    engine = recording(is_embedding=True)
    for number in (1, 2):
        engine.add(number, [5, 6, 7, 8][: number + 2], 0, extras=[VECTOR])
    engine.run()
    assert engine.runner.recorder.is_on
    assert [engine.reasons[number].type for number in (1, 2)] == ["length", "length"]
