"""Hidden states against `transformers`, and prompts given as embeddings, under each schedule."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.extras.logprobs.positions import LogprobSpec
from tests.support.engine import HiddenMode, InProcessEngine
from tests.support.graphs import add_eager_graphs
from tests.support.tiny_models import tiny_model

TOLERANCE = 1e-3
NUM_NEW = 24
PROMPTS = [np.random.default_rng(i).integers(3, 500, 9 + 7 * i).tolist() for i in range(12)]


@cache
def reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32).eval()


def reference_hidden(tokens: list[int]) -> np.ndarray:
    """`[len(tokens), hidden_size]` after the last norm: what the head is applied to."""
    with torch.no_grad():
        output = reference_model()(torch.tensor([tokens]), output_hidden_states=True)
    hidden = output.hidden_states[-1][0]
    logits = reference_model().lm_head(hidden)
    assert torch.allclose(logits, output.logits[0], atol=1e-5), "this is not the last norm's output"
    return hidden.numpy()


def embeds_of(tokens: list[int]) -> bytes:
    weight = reference_model().get_input_embeddings().weight
    return weight[torch.tensor(tokens)].detach().numpy().astype(np.float32).tobytes()


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model("qwen3")


def check(engine: InProcessEngine, request_id: int, prompt: list[int], mode: HiddenMode) -> None:
    tokens = [*prompt, *engine.tokens[request_id]]
    expected = reference_hidden(tokens[:-1])
    inputs, outputs = engine.hidden_inputs[request_id], engine.hidden_outputs[request_id]
    if mode == "last":
        assert not inputs
        assert len(outputs) == 1
        assert np.abs(np.array(outputs[0]) - expected[-1]).max() < TOLERANCE
        return
    assert len(inputs) == len(prompt) - 1
    assert len(outputs) == len(tokens) - len(prompt)
    assert np.abs(np.array([*inputs, *outputs]) - expected).max() < TOLERANCE


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunked_prefill_size": 5},
    "chunked overlap": {"chunked_prefill_size": 7, "overlap": True},
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
    engine = InProcessEngine(folder, enable_return_hidden_states=True, **WAYS[way])
    modes: list[HiddenMode] = ["all", "last", "", "all"]
    for i, prompt in enumerate(PROMPTS):
        mode = modes[i % 4]
        engine.add(i + 1, prompt, NUM_NEW, hidden_states=mode, ignore_eos=True)
    engine.run()
    for i, prompt in enumerate(PROMPTS):
        if mode := modes[i % 4]:
            check(engine, i + 1, prompt, mode)
        else:
            assert not engine.hidden_inputs[i + 1]
            assert not engine.hidden_outputs[i + 1]
    if "few pages" in way:
        # A request put back reports nothing twice: the lengths above say so.
        assert engine.shared["num_retractions_total"] > 0


def test_a_cached_prefix_hides_nothing(folder: Path) -> None:
    prompt = PROMPTS[11]
    engine = InProcessEngine(folder, enable_return_hidden_states=True)
    engine.add(1, prompt, 3)
    engine.run()
    for request_id, mode, cached in ((2, "all", 0), (3, "last", 80)):
        engine.add(request_id, prompt, 5, hidden_states=mode, ignore_eos=True)
        engine.run()
        assert engine.cached[request_id] == cached
        check(engine, request_id, prompt, mode)
    # Beside log-probabilities from a later start.
    engine.add(4, prompt, 5, LogprobSpec(40), hidden_states="all", ignore_eos=True)
    engine.run()
    check(engine, 4, prompt, "all")
    assert len(engine.inputs[4]) == len(prompt) - 41


def test_nothing_to_generate_still_shows_the_whole_prompt(folder: Path) -> None:
    prompt = PROMPTS[2]
    engine = InProcessEngine(folder, enable_return_hidden_states=True)
    engine.add(1, prompt, 0, hidden_states="all")
    engine.run()
    assert engine.tokens[1] == []
    rows = np.array([*engine.hidden_inputs[1], *engine.hidden_outputs[1]])
    assert np.abs(rows - reference_hidden(prompt)).max() < TOLERANCE


def test_from_the_buffers_of_graphs(folder: Path) -> None:
    engine = InProcessEngine(folder, overlap=True, enable_return_hidden_states=True)
    add_eager_graphs(engine.runner, max_batch=8, keep_hidden=True)
    modes: list[HiddenMode] = ["all", "last", ""]
    for i in range(6):
        options = {"temperature": 0.5} if i == 1 else {}
        engine.add(
            i + 1, PROMPTS[i], NUM_NEW, hidden_states=modes[i % 3], ignore_eos=True, **options
        )
    engine.run()
    for i in range(6):
        if modes[i % 3]:
            check(engine, i + 1, PROMPTS[i], modes[i % 3])


@pytest.mark.parametrize("way", WAYS)
def test_embeddings_of_tokens_give_what_the_tokens_give(folder: Path, way: str) -> None:
    def run(*, as_embeds: bool) -> InProcessEngine:
        engine = InProcessEngine(folder, disable_radix_cache=True, **WAYS[way])
        for i, prompt in enumerate(PROMPTS):
            given: dict[str, Any] = {}
            if as_embeds and i % 3:
                given["input_embeds"] = embeds_of(prompt)
                prompt = [0] * len(prompt)
            given |= {"repetition_penalty": 1.1, "ignore_eos": True}
            engine.add(i + 1, prompt, NUM_NEW, LogprobSpec(), **given)
        engine.run()
        return engine

    by_embeds, by_tokens = run(as_embeds=True), run(as_embeds=False)
    assert by_embeds.tokens == by_tokens.tokens
    for request_id, positions in by_tokens.outputs.items():
        found = [each.logprob for each in by_embeds.outputs[request_id]]
        assert found == pytest.approx([each.logprob for each in positions], abs=TOLERANCE)
    if "few pages" in way:
        assert by_embeds.shared["num_retractions_total"] > 0


def test_a_failing_neighbour_leaves_embeddings_and_states_right(folder: Path) -> None:
    engine = InProcessEngine(folder, disable_radix_cache=True, enable_return_hidden_states=True)

    def fail_together(forward: Any, batch: Any) -> Any:
        if len(batch.seq_lens) > 1:
            raise RuntimeError("planted")
        return forward(batch)

    for i in (3, 4, 5):
        prompt = PROMPTS[i]
        given = {"input_embeds": embeds_of(prompt)} if i != 4 else {}
        ids = [0] * len(prompt) if given else prompt
        engine.add(i, ids, 4, hidden_states="all", ignore_eos=True, **given)
    with engine.computing(fail_together):
        engine.run()
    for i in (3, 4, 5):
        check(engine, i, PROMPTS[i], "all")
