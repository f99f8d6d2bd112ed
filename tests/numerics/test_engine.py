"""The whole worker against `transformers`, and against itself under every way of scheduling."""

import logging
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.executor import model_runner
from tests.support.engine import TOO_LARGE_SEED, InProcessEngine
from tests.support.tiny_models import tiny_model

NUM_NEW = 64
PROMPTS = [np.random.default_rng(i).integers(3, 500, 3 + 7 * i).tolist() for i in range(16)]


@cache
def reference_tokens(name: str) -> list[list[int]]:
    """What `transformers` generates for `PROMPTS`."""
    from transformers import AutoModelForCausalLM

    folder = tiny_model(name)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        out.append(made[0, len(prompt) :].tolist())
    return out


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def model(request: pytest.FixtureRequest) -> tuple[Path, list[list[int]]]:
    return tiny_model(request.param), reference_tokens(request.param)


@pytest.mark.parametrize("batch_size", [1, 2, 5, 16])
def test_greedy_equals_transformers(model: tuple[Path, list[list[int]]], batch_size: int) -> None:
    folder, expected = model
    engine = InProcessEngine(folder)
    for i in range(batch_size):
        engine.add(i + 1, PROMPTS[i], NUM_NEW, ignore_eos=True)
    engine.run()
    for i in range(batch_size):
        assert engine.tokens[i + 1] == expected[i]


WAYS: dict[str, dict[str, Any]] = {
    "chunked": {"chunked_prefill_size": 5},
    "overlap": {"overlap": True},
    "overlap and chunked": {"overlap": True, "chunked_prefill_size": 7},
    "retracted": {"max_total_tokens": 480},
    "retracted and overlap": {"max_total_tokens": 480, "overlap": True},
    "small pages": {"page_size": 1},
    "no prefix cache": {"disable_radix_cache": True},
    "reference attention": {"attention_backend": "torch"},
    "few rows": {"max_running_requests": 3},
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_scheduling_does_not_change_the_output(name: str, way: str) -> None:
    folder = tiny_model(name)
    expected = reference_tokens(name)
    engine = InProcessEngine(folder, **WAYS[way])
    for i in range(8):
        engine.add(i + 1, PROMPTS[i], NUM_NEW, ignore_eos=True)
    engine.run()
    if "retracted" in way:
        assert engine.shared["num_retractions_total"] > 0
    for i in range(8):
        assert engine.tokens[i + 1] == expected[i]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cached_prefix_equals_cold(name: str) -> None:
    engine = InProcessEngine(tiny_model(name))
    prompt = PROMPTS[12]
    cold = engine.generate(prompt, 32, ignore_eos=True)
    warm = engine.generate(prompt, 32, ignore_eos=True)
    assert warm == cold
    assert engine.cached[2] == (len(prompt) - 1) // 16 * 16
    longer = engine.generate(prompt + cold[:20], 12, ignore_eos=True)
    assert longer == cold[20:]
    assert engine.cached[3] > engine.cached[2]


SAMPLERS: dict[str, dict[str, Any]] = {
    "seeded": {"temperature": 1.0, "seed": 7},
    "top-k": {"temperature": 0.8, "top_k": 5, "seed": 8},
    "top-p": {"temperature": 1.3, "top_p": 0.7, "seed": 9},
    "min-p": {"temperature": 1.0, "min_p": 0.2, "top_k": 40, "top_p": 0.9, "seed": 10},
    "penalties": {
        "frequency_penalty": 1.5,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.3,
    },
    "seeded with penalties": {"temperature": 1.0, "seed": 11, "frequency_penalty": 2.0},
    "bias": {"logit_bias": {17: 3.0, 40: -5.0}},
    "min tokens": {"min_new_tokens": 20, "stop_token_ids": list(range(3, 200))},
    "greedy": {},
}


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True}, {"max_total_tokens": 400}, {"max_total_tokens": 400, "overlap": True}],
    ids=["plain", "overlap", "retracted", "retracted and overlap"],
)
def test_a_request_does_not_feel_its_neighbours(options: dict[str, Any]) -> None:
    folder = tiny_model("qwen3")
    alone = {}
    for name, sampling in SAMPLERS.items():
        alone[name] = InProcessEngine(folder).generate(PROMPTS[3], 40, **sampling)
    assert len(alone["min tokens"]) >= 20
    assert alone["penalties"] != alone["greedy"]
    together = InProcessEngine(folder, **options)
    for i, sampling in enumerate(SAMPLERS.values(), 1):
        together.add(i, PROMPTS[3], 40, **sampling)
    together.run()
    for i, name in enumerate(SAMPLERS, 1):
        assert together.tokens[i] == alone[name], name


def test_bias_decides_a_greedy_token() -> None:
    engine = InProcessEngine(tiny_model("llama"))
    assert engine.generate(PROMPTS[2], 1, logit_bias={123: 1000.0}) == [123]


def test_penalties_equal_their_definition() -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model("llama")
    engine = InProcessEngine(folder)
    got = engine.generate(
        PROMPTS[4],
        24,
        ignore_eos=True,
        frequency_penalty=0.7,
        presence_penalty=0.4,
        repetition_penalty=1.2,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made: list[int] = []
    for _ in range(24):
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[4] + made])).logits[0, -1]
        for token in set(made):
            value = logits[token]
            logits[token] = value / 1.2 if value >= 0 else value * 1.2
            logits[token] -= 0.7 * made.count(token) + 0.4
        made.append(int(logits.argmax()))
    assert got == made


def test_a_request_that_cannot_take_its_row_fails_alone() -> None:
    folder = tiny_model("llama")
    alone = InProcessEngine(folder).generate(PROMPTS[3], 12, ignore_eos=True)
    engine = InProcessEngine(folder)
    engine.add(1, PROMPTS[3], 12, ignore_eos=True)
    engine.add(2, PROMPTS[5], 12, seed=TOO_LARGE_SEED)
    engine.run()
    assert engine.tokens[1] == alone
    assert engine.reasons[2].status_code == 500
    assert engine.generate(PROMPTS[3], 12, ignore_eos=True) == alone


def test_a_failed_step_leaves_its_memory_to_those_that_are_tried_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # A graph does not call the model.
    engine = InProcessEngine(tiny_model("llama"), disable_cuda_graph=True)
    failed: list[weakref.ref[torch.Tensor]] = []

    def fail_together(forward: Any, batch: Any) -> Any:
        if len(batch.seq_lens) > 1:
            large = torch.zeros(8)
            failed.append(weakref.ref(large))
            raise torch.OutOfMemoryError("planted")
        assert all(each() is None for each in failed), "its tensors are held while others compute"
        return forward(batch)

    # pytest keeps every record of a log, and with it the traceback.
    caplog.set_level(logging.CRITICAL + 1, model_runner.logger.name)
    for i in range(3):
        engine.add(i + 1, PROMPTS[i], 4, ignore_eos=True)
    with engine.computing(fail_together):
        engine.run()
    assert failed
    assert [engine.reasons[i + 1].type for i in range(3)] == ["length"] * 3
