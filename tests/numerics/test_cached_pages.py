"""Pages of the prefix cache hold the same values as computing the whole prompt."""

from __future__ import annotations

import random

import pytest
import torch

from runtime.ipc.messages import AbortRequests, ContinueGeneration, FlushCache, PauseGeneration
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model

PAGE = 16
SHARED = [[5 + i % 90 for i in range(40)], [200 + i % 70 for i in range(56)]]
PROMPTS = [[*SHARED[i % 2], *([9 + i] * (5 + 9 * (i % 4)))] for i in range(8)]


def cached_keys(engine: InProcessEngine, number: int, prompt: list[int]) -> list[torch.Tensor]:
    """Keys and values of a prompt's tokens after it was computed, cached parts as they lay there.

    Returns:
        For each layer `[2, num_tokens, num_kv_heads, head_dim]`.
    """
    seen = []

    def note(forward, batch):
        seen.append((batch.kv, batch.page_table[0].long().clone()))
        return forward(batch)

    engine.add(number, prompt, 1, ignore_eos=True)
    with engine.computing(note):
        engine.run()
    kv, pages = seen[-1]
    pages = pages[: -(-len(prompt) // PAGE)]
    return [
        torch.stack([each[pages].transpose(1, 2).flatten(0, 1) for each in (layer.k, layer.v)])[
            :, : len(prompt)
        ]
        for layer in kv
    ]


def wrong_tokens(engine: InProcessEngine, number: int, prompt: list[int]) -> list[int]:
    """Cached tokens of `prompt` whose keys or values are not those of computing it alone."""
    alone = InProcessEngine(tiny_model("qwen3"), disable_radix_cache=True)
    wrong = torch.zeros(len(prompt), dtype=torch.bool)
    for found, expected in zip(
        cached_keys(engine, number, prompt), cached_keys(alone, 1, prompt), strict=True
    ):
        wrong |= ((found - expected).abs() > 1e-4).any(-1).any(-1).any(0)
    assert engine.cached[number] > PAGE
    return wrong[: engine.cached[number]].nonzero().flatten().tolist()


@pytest.mark.parametrize("overlap", [False, True])
def test_after_aborts_retractions_and_evictions_each_page_is_right(overlap: bool) -> None:
    draw = random.Random(3)
    # Too few pages for all: some are put back, others evicted.
    engine = InProcessEngine(
        tiny_model("qwen3"), overlap=overlap, chunked_prefill_size=24, max_total_tokens=22 * PAGE
    )
    number = 0
    for step in range(300):
        if draw.random() < 0.3 and number < 60:
            engine.add(number, draw.choice(PROMPTS), draw.randint(1, 30), ignore_eos=True)
            number += 1
        if number and draw.random() < 0.05:
            engine.scheduler.receive([AbortRequests([draw.randrange(number)])])
        if step % 41 == 0:
            engine.scheduler.receive([PauseGeneration(step, True), ContinueGeneration(step)])
        engine.scheduler.step()
    engine.run()
    assert number > 40
    assert sum(engine.retractions.values()) > 0
    for prompt in PROMPTS[:4]:
        # Once so that it is cached, and once to look at it.
        engine.add(number + 1, prompt, 1, ignore_eos=True)
        engine.run()
        assert not wrong_tokens(engine, number + 2, prompt)
        number += 2


def test_a_page_with_other_contents_is_noticed() -> None:
    """By the look into the pages, and by the answer of a request whose tokens are known."""
    engine, prompt = InProcessEngine(tiny_model("qwen3")), PROMPTS[3]
    assert len(prompt) > 3 * PAGE
    engine.add(1, prompt, 12, ignore_eos=True)
    engine.run()

    def plant(forward, batch):
        # The second page, ahead of the step that reads it.
        page = int(batch.page_table[0, 1])
        if not planted:
            planted.append(page)
            batch.kv[0].v[page] += 5.0
        return forward(batch)

    planted: list[int] = []
    engine.add(2, prompt, 12, ignore_eos=True)
    with engine.computing(plant):
        engine.run()
    assert engine.cached[2] > 2 * PAGE
    assert engine.tokens[2] != engine.tokens[1]
    assert wrong_tokens(engine, 3, prompt) == [*range(PAGE, 2 * PAGE)]
    engine.scheduler.receive([FlushCache(1)])
    engine.add(4, prompt, 12, ignore_eos=True)
    engine.run()
    assert engine.tokens[4] == engine.tokens[1]
