"""Decode steps that are recorded on a CPU: when they are, and when a recording is dropped."""

from __future__ import annotations

import pytest

from kernels.cpu.library import unavailable
from runtime.ipc.weight_messages import LoadDummy, ReleaseMemory, ResumeMemory
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="no C++ library")

PROMPT = [5, 6, 7, 8]
NUM_NEW = 12


def _tokens(engine: InProcessEngine, request_id: int) -> list[int]:
    engine.add(request_id, PROMPT, NUM_NEW, ignore_eos=True)
    engine.run()
    return engine.tokens[request_id]


def _plain_tokens(engine: InProcessEngine, request_id: int) -> list[int]:
    with engine.computing(lambda forward, batch: forward(batch)):
        return _tokens(engine, request_id)


def test_decode_steps_are_repeated() -> None:
    engine = InProcessEngine(tiny_model("qwen3"), disable_radix_cache=True)
    steps = engine.runner.steps
    before = steps.num_repeats
    tokens = _tokens(engine, 1)
    # The prompt's step gives the first token, and the second one may be recorded.
    assert steps.num_repeats >= before + NUM_NEW - 2
    before = steps.num_repeats
    assert _plain_tokens(engine, 2) == tokens
    assert steps.num_repeats == before


def test_experts_are_not_recorded() -> None:
    engine = InProcessEngine(tiny_model("qwen3_moe"))
    _tokens(engine, 1)
    assert engine.runner.steps.num_repeats == 0


def test_new_weights_and_new_pages_drop_recordings() -> None:
    engine = InProcessEngine(tiny_model("qwen3"), disable_radix_cache=True)
    before = _tokens(engine, 1)
    assert engine.ask(LoadDummy(seed=3), flush_cache=True).success
    after = _tokens(engine, 2)
    assert after == _plain_tokens(engine, 3)
    assert after != before
    num_repeats = engine.runner.steps.num_repeats
    assert engine.ask(ReleaseMemory(["kv_cache"])).success
    assert engine.ask(ResumeMemory(["kv_cache"])).success
    assert _tokens(engine, 4) == after
    assert engine.runner.steps.num_repeats > num_repeats


def test_a_repetition_with_other_bits_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    engine = InProcessEngine(tiny_model("qwen3"), disable_radix_cache=True)
    steps, layer = engine.runner.steps, engine.model.model.layers[0]

    def tokens_after_a_change(request_id: int) -> list[int]:
        steps.forget()
        engine.add(request_id, PROMPT, NUM_NEW, ignore_eos=True)
        while len(engine.tokens.get(request_id, [])) < 2:
            engine.scheduler.step()
        # A recording does not see that this number changes after it was made.
        layer.residual_scale = 0.5
        engine.run()
        layer.residual_scale = 1.0
        return engine.tokens[request_id]

    before = steps.num_repeats
    found = tokens_after_a_change(1)
    assert steps.num_repeats == before + 1
    assert "differs" in caplog.text
    with engine.computing(lambda forward, batch: forward(batch)):
        assert tokens_after_a_change(2) == found
