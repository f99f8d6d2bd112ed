"""Entropies of generated tokens against `transformers`, under every way of scheduling."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.extras.logprobs.positions import LogprobSpec
from runtime.requests.extra_spec import ExtraSpec
from tests.support.engine import InProcessEngine
from tests.support.graphs import add_eager_graphs
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

TOLERANCE = 1e-3
NUM_NEW = 24
WANTED = [ExtraSpec("entropy")]
PROMPTS = [np.random.default_rng(i).integers(3, 500, 9 + 5 * i).tolist() for i in range(16)]


@cache
def reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32).eval()


def reference_entropies(prompt: list[int], output: list[int]) -> list[float]:
    """Of what each output token came from, in double precision."""
    with torch.no_grad():
        logits = reference_model()(torch.tensor([prompt + output])).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1].double(), dim=-1)
    found: list[float] = (-(logprobs.exp() * logprobs).sum(-1)).tolist()
    return found


def entropies(engine: InProcessEngine, request_id: int) -> list[float]:
    blocks = engine.blocks.get((request_id, "entropy"), [])
    assert not any(block.is_input for block in blocks)
    return [value for block in blocks for value in np.frombuffer(block.data, dtype=np.float32)]


def check(engine: InProcessEngine, request_id: int, prompt: list[int]) -> None:
    output = engine.tokens[request_id]
    found = entropies(engine, request_id)
    assert len(found) == len(output)
    assert found == pytest.approx(reference_entropies(prompt, output), abs=TOLERANCE)
    # Random weights are unsure, but not equally so: a constant would not do.
    assert np.std(found) > 1e-2


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model("qwen3")


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"chunked_prefill_size": 5},
    "chunked overlap": {"chunked_prefill_size": 7, "overlap": True},
    "few pages": {"max_total_tokens": 16 * 24, "max_running_requests": 12},
    "few pages overlap": {
        "max_total_tokens": 16 * 24,
        "overlap": True,
        "chunked_prefill_size": 100,
        "max_running_requests": 12,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_equal_transformers(folder: Path, way: str) -> None:
    engine = InProcessEngine(folder, **WAYS[way])
    for i, prompt in enumerate(PROMPTS):
        engine.add(i + 1, prompt, NUM_NEW, extras=WANTED if i % 4 else (), ignore_eos=True)
    engine.run()
    for i, prompt in enumerate(PROMPTS):
        if i % 4:
            check(engine, i + 1, prompt)
        else:
            assert not entropies(engine, i + 1)
    if "few pages" in way:
        # A request put back reports nothing twice: the lengths above say so.
        assert engine.shared["num_retractions_total"] > 0


@pytest.mark.parametrize("batch", [1, 2, 5, 16])
def test_batches(folder: Path, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three rows at a time, as with a vocabulary of 5.6 million.
    monkeypatch.setattr("runtime.extras.entropy.device.MAX_LOGITS", 3 * VOCAB_SIZE)
    engine = InProcessEngine(folder)
    for i in range(batch):
        engine.add(i + 1, PROMPTS[i], 8, extras=WANTED, ignore_eos=True)
    engine.run()
    for i in range(batch):
        check(engine, i + 1, PROMPTS[i])


def test_a_cached_prefix_changes_nothing(folder: Path) -> None:
    prompt = PROMPTS[15]
    engine = InProcessEngine(folder)
    for request_id, cached in ((1, 0), (2, 80)):
        engine.add(request_id, prompt, 6, extras=WANTED, ignore_eos=True)
        engine.run()
        assert engine.cached[request_id] == cached
        check(engine, request_id, prompt)


def test_the_model_s_own_whatever_is_sampled_from(folder: Path) -> None:
    """Neither temperature nor penalties, biases and masks count, nor a neighbour that has them."""
    engine = InProcessEngine(folder)
    edited = {
        "temperature": 0.3,
        "top_k": 5,
        "logit_bias": {9: 30.0, 200: -100.0},
        "repetition_penalty": 1.5,
        "min_new_tokens": NUM_NEW,
        "seed": 5,
    }
    engine.add(1, PROMPTS[3], NUM_NEW, LogprobSpec(), extras=WANTED, **edited)
    engine.add(2, PROMPTS[4], NUM_NEW, extras=WANTED, ignore_eos=True)
    engine.run()
    check(engine, 1, PROMPTS[3])
    check(engine, 2, PROMPTS[4])


def test_it_is_that_of_the_log_probabilities_where_nothing_is_edited(folder: Path) -> None:
    engine = InProcessEngine(folder)
    spec = LogprobSpec(top_num=VOCAB_SIZE)
    engine.add(1, PROMPTS[2], 6, spec, extras=WANTED, ignore_eos=True)
    engine.run()
    summed = []
    for position in engine.outputs[1]:
        logprobs = np.array([value for value, _ in position.top])
        summed.append(float(-(np.exp(logprobs) * logprobs).sum()))
    assert entropies(engine, 1) == pytest.approx(summed, abs=1e-4)


def test_of_the_next_token_where_none_is_made(folder: Path) -> None:
    engine = InProcessEngine(folder)
    engine.add(1, PROMPTS[2], 0, extras=WANTED)
    engine.add(2, PROMPTS[2], 1, extras=WANTED, ignore_eos=True)
    engine.run()
    assert engine.tokens[1] == []
    assert entropies(engine, 1) == pytest.approx(entropies(engine, 2), abs=1e-5)


def test_from_the_buffers_of_graphs(folder: Path) -> None:
    engine = InProcessEngine(folder, overlap=True)
    add_eager_graphs(engine.runner, max_batch=8)
    for i in range(6):
        engine.add(i + 1, PROMPTS[i], NUM_NEW, extras=WANTED if i % 2 else (), ignore_eos=True)
    engine.run()
    for i in range(1, 6, 2):
        check(engine, i + 1, PROMPTS[i])
