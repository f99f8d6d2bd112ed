"""Log-probabilities against `transformers`, under every way of scheduling."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.extras.logprobs.positions import LogprobSpec, PositionLogprobs
from runtime.models.registry import read_model_spec
from tests.support.engine import InProcessEngine
from tests.support.graphs import add_eager_graphs
from tests.support.tiny_models import tiny_model

TOLERANCE = 1e-3
NUM_NEW = 24
ASKED = [7, 3, 400]
EVERYTHING = LogprobSpec(0, 5, ASKED)
PROMPTS = [np.random.default_rng(i).integers(3, 500, 9 + 7 * i).tolist() for i in range(12)]


@cache
def reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32).eval()


def reference_logprobs(tokens: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """`[len(tokens) - 1, vocab_size]`: what each position says about the next token."""
    with torch.no_grad():
        logits = reference_model()(torch.tensor([list(tokens)])).logits[0, :-1].float()
    return torch.log_softmax(logits / temperature, dim=-1)


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model("qwen3")


def check(
    found: Sequence[PositionLogprobs],
    expected: torch.Tensor,
    tokens: Sequence[int],
    top_num: int = 5,
    asked: Sequence[int] = ASKED,
) -> None:
    assert len(found) == len(expected) == len(tokens)
    for position, row, token_id in zip(found, expected, tokens, strict=True):
        assert position.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        values = [value for value, _ in position.top]
        assert values == sorted(values, reverse=True)
        assert len(values) == top_num
        for (value, top_id), best in zip(position.top, row.topk(top_num).values, strict=True):
            assert value == pytest.approx(float(best), abs=TOLERANCE)
            assert value == pytest.approx(float(row[top_id]), abs=TOLERANCE)
        assert len(position.id_values) == len(asked)
        for value, wanted in zip(position.id_values, asked, strict=True):
            assert value == pytest.approx(float(row[wanted]), abs=TOLERANCE)


def check_request(engine: InProcessEngine, request_id: int, prompt: list[int], start: int) -> None:
    output = engine.tokens[request_id]
    expected = reference_logprobs([*prompt, *output])
    first = len(prompt) - 1
    check(engine.outputs[request_id], expected[first:], output)
    check(engine.inputs[request_id], expected[start:first], prompt[start + 1 :])


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunked_prefill_size": 5},
    "overlap": {"overlap": True},
    "chunked overlap": {"chunked_prefill_size": 7, "overlap": True},
    "no cache": {"disable_radix_cache": True},
    "few pages": {"max_total_tokens": 16 * 20, "max_running_requests": 12},
    "few pages overlap": {
        "max_total_tokens": 16 * 20,
        "overlap": True,
        "chunked_prefill_size": 100,
        "max_running_requests": 12,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_equal_transformers(folder: Path, way: str) -> None:
    engine = InProcessEngine(folder, **WAYS[way])
    for i, prompt in enumerate(PROMPTS):
        engine.add(i + 1, prompt, NUM_NEW, EVERYTHING, ignore_eos=True)
    engine.run()
    for i, prompt in enumerate(PROMPTS):
        check_request(engine, i + 1, prompt, 0)
    if "few pages" in way:
        # A request put back reports nothing twice: the lengths above say so.
        assert engine.shared["num_retractions_total"] > 0


def test_parts_of_a_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.extras.logprobs.device.MAX_LOGITS", 3 * 512)
    engine = InProcessEngine(folder)
    engine.add(1, PROMPTS[5], 2, EVERYTHING)
    engine.run()
    check_request(engine, 1, PROMPTS[5], 0)


@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 40, 84, 85, 86])
def test_cached_prefix(folder: Path, start: int) -> None:
    prompt = PROMPTS[11]
    assert len(prompt) == 86
    engine = InProcessEngine(folder)
    engine.add(1, prompt, 3)
    engine.run()
    engine.add(2, prompt, 3, LogprobSpec(start, 5, ASKED), ignore_eos=True)
    engine.run()
    assert engine.cached[2] == min(start, 85) // 16 * 16
    check_request(engine, 2, prompt, min(start, 85))
    engine.add(3, prompt, 3, LogprobSpec(-1, 5, ASKED), ignore_eos=True)
    engine.run()
    assert engine.cached[3] == 80
    assert not engine.inputs[3]
    check_request(engine, 3, prompt, 85)


def test_scoring_equals_generation(folder: Path) -> None:
    engine = InProcessEngine(folder)
    engine.add(1, PROMPTS[4], NUM_NEW, LogprobSpec(), ignore_eos=True)
    engine.run()
    whole = [*PROMPTS[4], *engine.tokens[1]]
    engine.add(2, whole, 0, LogprobSpec(len(PROMPTS[4]) - 1))
    engine.run()
    assert engine.tokens[2] == []
    assert engine.reasons[2].type == "length"
    # What would come next is reported, though it is no part of the output.
    assert len(engine.outputs[2]) == 1
    scored = [each.logprob for each in engine.inputs[2]]
    generated = [each.logprob for each in engine.outputs[1]]
    assert scored == pytest.approx(generated, abs=TOLERANCE)


def test_temperature_bias_and_cuts(folder: Path) -> None:
    prompt, bias = PROMPTS[3], {9: 3.0, 200: -100.0}
    engine = InProcessEngine(folder)
    options = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    engine.add(
        1, prompt, NUM_NEW, LogprobSpec(-1, 30, [200]), ignore_eos=True, logit_bias=bias, **options
    )
    engine.run()
    output = engine.tokens[1]
    with torch.no_grad():
        logits = reference_model()(torch.tensor([prompt + output])).logits[0].float()
    for token_id, value in bias.items():
        logits[:, token_id] += value
    expected = torch.log_softmax(logits / 0.7, dim=-1)[len(prompt) - 1 : -1]
    check(engine.outputs[1], expected, output, 30, [200])


def test_penalties_and_masks(folder: Path) -> None:
    prompt = PROMPTS[2]
    engine = InProcessEngine(folder)
    engine.add(
        1,
        prompt,
        NUM_NEW,
        LogprobSpec(),
        min_new_tokens=NUM_NEW,
        stop_token_ids=[5],
        frequency_penalty=0.5,
        presence_penalty=0.4,
        repetition_penalty=1.2,
    )
    engine.run()
    output = engine.tokens[1]
    with torch.no_grad():
        logits = reference_model()(torch.tensor([prompt + output])).logits[0].float()
    masked = [5, *read_model_spec(folder).eos_token_ids]
    for at, (token_id, found) in enumerate(zip(output, engine.outputs[1], strict=True)):
        row = logits[len(prompt) - 1 + at].clone()
        for seen in set(output[:at]):
            row[seen] = row[seen] / 1.2 if row[seen] >= 0 else row[seen] * 1.2
            row[seen] -= 0.5 * output[:at].count(seen) + 0.4
        row[masked] = -torch.inf
        expected = torch.log_softmax(row, dim=-1)[token_id]
        assert found.logprob == pytest.approx(float(expected), abs=TOLERANCE)


def test_masked_ids_stay_finite(folder: Path) -> None:
    engine = InProcessEngine(folder)
    spec = LogprobSpec(-1, 1000, [5])
    engine.add(1, PROMPTS[0], 2, spec, min_new_tokens=2, stop_token_ids=[5])
    engine.run()
    for position in engine.outputs[1]:
        assert np.isfinite([value for value, _ in position.top]).all()
        assert position.id_values == [-1e9]


def test_neighbours_change_nothing(folder: Path) -> None:
    options = {"temperature": 0.9, "seed": 3, "ignore_eos": True}
    alone = InProcessEngine(folder)
    alone.add(1, PROMPTS[6], NUM_NEW, LogprobSpec(0, 3, [7]), **options)
    alone.run()
    plain = InProcessEngine(folder)
    crowd = InProcessEngine(folder)
    for i, prompt in enumerate(PROMPTS):
        plain.add(i + 10, prompt, NUM_NEW, ignore_eos=True)
        spec = LogprobSpec(0, i, list(range(i))) if i % 2 else None
        crowd.add(i + 10, prompt, NUM_NEW, spec, ignore_eos=True)
    crowd.add(1, PROMPTS[6], NUM_NEW, LogprobSpec(0, 3, [7]), **options)
    plain.run()
    crowd.run()
    assert crowd.tokens[1] == alone.tokens[1]
    for mine, theirs in zip(crowd.outputs[1], alone.outputs[1], strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert len(mine.top) == 3
        assert len(mine.id_values) == 1
    for i in range(len(PROMPTS)):
        assert crowd.tokens[i + 10] == plain.tokens[i + 10]
        if i % 2 == 0:
            assert crowd.outputs[i + 10] == crowd.inputs[i + 10] == []


def test_a_failing_neighbour_loses_nothing(folder: Path) -> None:
    engine = InProcessEngine(folder)

    def fail_on_token_1(forward: Any, batch: Any) -> Any:
        # In a prompt: the tokens of those that decode come first.
        if 1 in batch.input_ids[batch.num_decodes :]:
            raise ValueError("planted")
        return forward(batch)

    for i in (0, 1, 2):
        engine.add(i + 1, PROMPTS[i], NUM_NEW, EVERYTHING, ignore_eos=True)
    engine.add(9, [1, 2, 1], NUM_NEW, EVERYTHING)
    with engine.computing(fail_on_token_1):
        engine.run()
    assert engine.reasons[9].type == "abort"
    for i in (0, 1, 2):
        check_request(engine, i + 1, PROMPTS[i], 0)


def test_from_the_buffers_of_graphs(folder: Path) -> None:
    engine = InProcessEngine(folder, overlap=True)
    add_eager_graphs(engine.runner, max_batch=8)
    for i in range(6):
        spec = EVERYTHING if i % 2 else None
        engine.add(i + 1, PROMPTS[i], NUM_NEW, spec, ignore_eos=True)
    engine.run()
    for i in range(1, 6, 2):
        check_request(engine, i + 1, PROMPTS[i], 0)
