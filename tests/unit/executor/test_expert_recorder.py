"""The recorder of expert use, which must not affect steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.executor.expert_recorder import FOLDER_VARIABLE, ExpertRecorder
from runtime.extras.pooled.parts import VECTOR
from runtime.models.layers.expert_counts import ExpertCounts
from runtime.step.step_plan import StepPlan
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model


def recording(**options: Any) -> InProcessEngine:
    folder = tiny_model("qwen2_moe")
    engine = InProcessEngine(folder, expert_recorder_mode="per_token", **options)
    engine.runner.recorder.start()
    return engine


def test_a_step_that_cannot_be_recorded_only_ends_the_recording(caplog) -> None:
    engine = recording()

    class Failing(ExpertRecorder):
        def end_step(self, plan: StepPlan, latest_input: torch.Tensor) -> None:
            raise MemoryError("planted")

    counts = ExpertCounts(3, 6, 2, [1, 2])
    engine.runner.recorder = Failing("stat", 10, 0, counts)
    engine.runner.recorder.start()
    assert len(engine.generate([5, 6, 7], 4, ignore_eos=True)) == 4
    assert not engine.runner.recorder.is_on
    assert "Recording of expert use stopped" in caplog.text


def test_vectors_of_texts_are_recorded_too() -> None:
    engine = recording(is_embedding=True)
    for number in (1, 2):
        engine.add(number, [5, 6, 7, 8][: number + 2], 0, extras=[VECTOR])
    engine.run()
    assert engine.runner.recorder.is_on
    assert [engine.reasons[number].type for number in (1, 2)] == ["length", "length"]


@pytest.mark.parametrize("overlap", [False, True])
def test_every_token_is_recorded_with_its_id(tmp_path, monkeypatch, overlap) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    # Prompts in chunks, beside sequences that decode.
    engine = recording(overlap=overlap, chunked_prefill_size=16)
    prompts = {1: [5, 6, 7], 2: list(range(30, 100)), 3: [9] * 20}
    for number, prompt in prompts.items():
        engine.add(number, prompt, 10, ignore_eos=True)
    engine.run()
    file = engine.runner.recorder.dump()
    records = torch.load(file, weights_only=True)["records"]  # noqa: TID251  # as users do
    for record in records:
        assert len(record["input_ids"]) == len(record["positions"])
        assert record["topk_ids_of_layer"].shape[1] == len(record["input_ids"])
    # A step that overlap launched before the end was known computes the last token too.
    pairs = [
        pair
        for record in records
        for pair in zip(record["positions"], record["input_ids"], strict=True)
    ]
    for number, prompt in prompts.items():
        wanted = prompt + engine.tokens[number]
        assert all(pair in pairs for pair in enumerate(wanted[:-1]))
    everything = [prompts[number] + engine.tokens[number] for number in prompts]
    computed = sum(len(tokens) - 1 for tokens in everything)
    assert computed <= len(pairs) <= computed + len(prompts)
    allowed = {pair for tokens in everything for pair in enumerate(tokens)}
    assert allowed.issuperset(pairs)
