"""Hidden states, given embeddings, log-probabilities: as in `transformers`, graphs or not."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from runtime.extras.logprobs.positions import LogprobSpec, PositionLogprobs
from tests.support.engine import HiddenMode, InProcessEngine
from tests.support.gpu import PROMPTS, TOLERANCE, count_graphs, small_engine
from tests.support.tiny_models import tiny_model

pytestmark = pytest.mark.also_cpu(asked=True)

MODEL = "llama"
NUM_NEW = 20
ASKED = [5, 77, 400]


@cache
def reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model(MODEL), dtype=torch.float32).eval()


@torch.no_grad()
def truth(tokens: Sequence[int]) -> tuple[np.ndarray, torch.Tensor]:
    """Of each token: `[n, hidden_size]` after the last norm, `[n, vocab_size]` about the next."""
    output = reference_model()(torch.tensor([list(tokens)]), output_hidden_states=True)
    return output.hidden_states[-1][0].numpy(), torch.log_softmax(output.logits[0], -1)


def embeds_of(tokens: list[int]) -> bytes:
    weight = reference_model().get_input_embeddings().weight
    return weight[torch.tensor(tokens)].detach().numpy().astype(np.float32).tobytes()


@pytest.fixture(scope="module", params=[True, False], ids=["graphs", "eager"])
def engine(request: pytest.FixtureRequest, graphs: None) -> InProcessEngine:
    return small_engine(
        tiny_model(MODEL),
        enable_return_hidden_states=True,
        disable_cuda_graph=not request.param,
    )


def check_hidden(engine: InProcessEngine, number: int, prompt: list[int], mode: HiddenMode) -> None:
    tokens = [*prompt, *engine.tokens[number]]
    expected, _ = truth(tokens[:-1])
    inputs, outputs = engine.hidden_inputs[number], engine.hidden_outputs[number]
    if mode == "":
        assert not inputs
        assert not outputs
    elif mode == "last":
        assert not inputs
        assert np.abs(np.array(outputs) - expected[-1:]).max() < TOLERANCE
    else:
        assert len(inputs) == len(prompt) - 1
        assert len(outputs) == len(tokens) - len(prompt)
        assert np.abs(np.array([*inputs, *outputs]) - expected).max() < TOLERANCE


def test_hidden_states(engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = None
    if engine.runner.has_graphs:
        counts = count_graphs(engine, monkeypatch)
    first = max(engine.tokens, default=0) + 1
    modes: list[HiddenMode] = ["last", "all", "last", ""]
    for i, prompt in enumerate(PROMPTS):
        # A row that is sampled, and one with log-probabilities, go another way behind the graph.
        options: dict[str, Any] = {"temperature": 0.7, "seed": 3} if i == 2 else {}
        spec = LogprobSpec(-1, 2) if i in (0, 3) else None
        engine.add(first + i, prompt, NUM_NEW, spec, modes[i % 4], ignore_eos=True, **options)
        engine.scheduler.step()
    engine.run()
    for i, prompt in enumerate(PROMPTS):
        check_hidden(engine, first + i, prompt, modes[i % 4])
    if counts is not None:
        assert counts["decode"] > 0
        assert counts["prompt"] > 0


def check_logprobs(
    found: Sequence[PositionLogprobs], expected: torch.Tensor, tokens: Sequence[int], top_num: int
) -> None:
    assert len(found) == len(expected) == len(tokens)
    for position, row, token_id in zip(found, expected, tokens, strict=True):
        assert position.logprob == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        best = row.topk(top_num).values.tolist()
        assert [value for value, _ in position.top] == pytest.approx(best, abs=TOLERANCE)
        for value, top_id in position.top:
            assert value == pytest.approx(float(row[top_id]), abs=TOLERANCE)
        assert position.id_values == pytest.approx(row[ASKED].tolist(), abs=TOLERANCE)


def test_log_probabilities_of_chunks_and_of_what_follows_a_cached_prefix(
    engine: InProcessEngine,
) -> None:
    # The longest is computed in three chunks, alone and beside others; then it is cached.
    for round_number, starts in enumerate([(0, 0, 0, 0, 0, 0), (60, 40, 2, 20, 0, 100)]):
        first = max(engine.tokens, default=0) + 1
        for i, (prompt, start) in enumerate(zip(PROMPTS, starts, strict=True)):
            spec = LogprobSpec(start, 1 + i, ASKED)
            engine.add(first + i, prompt, NUM_NEW, spec, ignore_eos=True)
        engine.run()
        for i, (prompt, start) in enumerate(zip(PROMPTS, starts, strict=True)):
            output = engine.tokens[first + i]
            _, expected = truth([*prompt, *output][:-1])
            last = len(prompt) - 1
            check_logprobs(engine.outputs[first + i], expected[last:], output, 1 + i)
            check_logprobs(
                engine.inputs[first + i], expected[start:last], prompt[start + 1 :], 1 + i
            )
        if round_number:
            assert engine.cached[first + 5] == 96


@pytest.mark.parametrize("with_graphs", [True, False], ids=["graphs", "eager"])
def test_embeddings_of_tokens_give_what_the_tokens_give(graphs: None, with_graphs: bool) -> None:
    engine = small_engine(
        tiny_model(MODEL), disable_radix_cache=True, disable_cuda_graph=not with_graphs
    )
    made = []
    for as_embeds in (False, True):
        first = max(engine.tokens, default=0) + 1
        for i, prompt in enumerate(PROMPTS):
            given: dict[str, Any] = {}
            if as_embeds and i % 3 < 2:
                given["input_embeds"] = embeds_of(prompt)
                prompt = [0] * len(prompt)
            engine.add(first + i, prompt, NUM_NEW, LogprobSpec(), ignore_eos=True, **given)
            engine.scheduler.step()
        engine.run()
        numbers = range(first, first + len(PROMPTS))
        made.append([engine.tokens[n] for n in numbers])
    assert made[0] == made[1]
    for prompt, ids in zip(PROMPTS, made[0], strict=True):
        _, expected = truth([*prompt, *ids][:-1])
        assert ids == expected[len(prompt) - 1 :].argmax(-1).tolist()
