"""Requests that are put back again and again give the tokens of an undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.ipc.messages import ContinueGeneration, PauseGeneration
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model

# Longer than a request lasts: never put back.
NEVER = 10**9
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 3, "top_k": 20},
    {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {33: 2.0}, "min_new_tokens": 20},
]


def run(every: int, *, overlap: bool) -> tuple[dict[int, list[int]], int]:
    """Tokens of requests that are all put back at each `every`-th step; how often that was."""
    engine = InProcessEngine(tiny_model("qwen3"), overlap=overlap, chunked_prefill_size=24)
    for number in range(8):
        prompt = [7 + number, 11, 13] * (1 + 5 * (number % 3))
        engine.add(number, prompt, 24, **SAMPLING[number % len(SAMPLING)])
    for step in range(1, 4000):
        if not engine.scheduler.has_work:
            break
        if step % every == 0:
            engine.scheduler.receive([PauseGeneration(step, True), ContinueGeneration(step)])
        engine.scheduler.step()
    engine.run()
    return engine.tokens, sum(engine.retractions.values())


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("every", [2, 5, 13])
def test_the_tokens_are_the_same_and_each_comes_once(every: int, overlap: bool) -> None:
    undisturbed, _ = run(NEVER, overlap=overlap)
    assert all(len(tokens) == 24 for tokens in undisturbed.values())
    disturbed, num_retractions = run(every, overlap=overlap)
    assert num_retractions > 0
    assert disturbed == undisturbed
