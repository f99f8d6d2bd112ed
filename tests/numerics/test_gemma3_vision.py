"""Gemma 3 with its tower against `transformers`: an image's tokens see one another both ways."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from runtime.extras.logprobs.positions import LogprobSpec
from runtime.models.vision.tower import Normalize
from tests.support.engine import InProcessEngine
from tests.support.tiny_gemma3_vision import (
    NUM_TOKENS,
    ONE,
    PROMPTS,
    THREE,
    TWO,
    Gemma3Reference,
    tiny_gemma3_vision,
)
from tests.support.tiny_vision import Prompt, pixels, prompt_of

NUM_NEW = 20


@cache
def reference() -> Gemma3Reference:
    return Gemma3Reference(tiny_gemma3_vision())


@cache
def expected() -> list[list[int]]:
    """What `transformers` generates for `PROMPTS`."""
    return [reference().greedy(prompt, NUM_NEW) for prompt in PROMPTS]


def add(engine: InProcessEngine, number: int, prompt: Prompt, **options: Any) -> None:
    count = options.pop("count", NUM_NEW)
    engine.add(number, prompt.ids, count, ignore_eos=True, images=prompt.images, **options)


def generate(engine: InProcessEngine, prompt: Prompt) -> list[int]:
    number = max(engine.tokens, default=0) + 1
    add(engine, number, prompt)
    engine.run()
    return engine.tokens[number]


def computed(engine: InProcessEngine) -> int:
    return int(engine.shared["images_computed_total"])


def test_pixels_and_features_equal_transformers() -> None:
    images = [ONE, TWO, THREE]
    model = InProcessEngine(tiny_gemma3_vision()).model
    normalize = Normalize(model.spec.vision, model.context)
    prepared = torch.stack([normalize.run(pixels(image)) for image in images])
    theirs = reference().pixels(images)["pixel_values"]
    torch.testing.assert_close(prepared, theirs, rtol=0, atol=1e-5)
    with torch.inference_mode():
        together = model.visual.see([pixels(image) for image in images])
        alone = [model.visual.see([pixels(image)])[0] for image in images]
    for ours, single, wanted in zip(together, alone, reference().features(images), strict=True):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5 * scale)
        torch.testing.assert_close(single, wanted, rtol=0, atol=1e-5 * scale)
        # What is kept of one image keeps no other's memory.
        assert ours.untyped_storage().nbytes() == ours.nbytes


# Chunk borders before images, behind them, and where one would be cut at either end.
CHUNKS = [-1, NUM_TOKENS, NUM_TOKENS + 1, NUM_TOKENS + 6, 2 * NUM_TOKENS + 3]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits_equal_transformers(chunk: int) -> None:
    """Of every position of a prompt, whole and in chunks."""
    folder = tiny_gemma3_vision(tied=chunk == NUM_TOKENS)
    engine, theirs = InProcessEngine(folder, chunked_prefill_size=chunk), Gemma3Reference(folder)
    for number, prompt in enumerate(PROMPTS, 1):
        add(engine, number, prompt, logprobs=LogprobSpec(0), count=1)
        engine.run()
        logprobs = theirs.logits(prompt).log_softmax(-1)
        wanted = [float(logprobs[at, token]) for at, token in enumerate(prompt.ids[1:])]
        found = [each.logprob for each in engine.inputs[number]]
        assert found[-len(wanted) :] == pytest.approx(wanted, abs=2e-3)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunked_prefill_size": NUM_TOKENS},
    "overlap and chunked": {"overlap": True, "chunked_prefill_size": NUM_TOKENS + 3},
    "retracted": {"max_total_tokens": 160, "page_size": 4, "chunked_prefill_size": 20},
    "retracted and overlap": {"max_total_tokens": 160, "page_size": 4, "overlap": True},
    "no prefix cache": {"disable_radix_cache": True},
    "reference attention": {"attention_backend": "torch", "chunked_prefill_size": 24},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("way", list(WAYS))
def test_greedy_equals_transformers_beside_others(way: str) -> None:
    """Requests with images and without, in one batch, twice."""
    engine = InProcessEngine(tiny_gemma3_vision(), **WAYS[way])
    for first in (1, 101):
        for number, prompt in enumerate(PROMPTS, first):
            add(engine, number, prompt)
        engine.run()
        assert [engine.tokens[first + i] for i in range(len(PROMPTS))] == expected()
    if "retracted" in way:
        assert engine.shared["num_retractions_total"] > 0
    # Each image once: neither the second time nor after a retraction.
    assert computed(engine) == 3


def test_streams_that_decode_keep_no_image_out() -> None:
    """More of them than tokens that an image leaves of a step."""
    engine = InProcessEngine(tiny_gemma3_vision(), chunked_prefill_size=NUM_TOKENS + 2)
    texts = [prompt_of(4 + number, seed=number) for number in range(6)]
    for number, prompt in enumerate(texts, 1):
        add(engine, number, prompt, count=60)
    for _ in range(8):
        engine.scheduler.step()
    add(engine, 10, PROMPTS[1])
    while 10 not in engine.reasons:
        engine.scheduler.step()
    assert not any(number in engine.reasons for number in range(1, 7))
    engine.run()
    assert engine.tokens[10] == expected()[1]
    for number, prompt in enumerate(texts, 1):
        assert engine.tokens[number] == reference().greedy(prompt, 60)


def test_an_image_that_no_step_can_hold_is_refused() -> None:
    engine = InProcessEngine(tiny_gemma3_vision(), chunked_prefill_size=NUM_TOKENS - 1)
    add(engine, 1, PROMPTS[0])
    add(engine, 2, PROMPTS[3])
    engine.run()
    assert engine.reasons[1].status_code == 400
    assert engine.reasons[1].message == (
        "An image's 16 tokens are computed in one step; steps of this server have at most 15."
    )
    assert engine.tokens[2] == expected()[3]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_second_question_finds_image_and_prefix(page_size: int) -> None:
    """Where pages end within an image, the rest of it is computed behind what is cached."""
    engine = InProcessEngine(tiny_gemma3_vision(), page_size=page_size)
    first, second = prompt_of(5, ONE, 7, seed=1), prompt_of(5, ONE, 9, seed=1)
    generate(engine, first)
    assert generate(engine, second) == reference().greedy(second, NUM_NEW)
    assert engine.cached[2] > 6
    behind_other_text = prompt_of(8, ONE, 9, seed=2)
    assert generate(engine, behind_other_text) == reference().greedy(behind_other_text, NUM_NEW)
    assert engine.cached[3] == 0
    other_image = prompt_of(5, TWO, 7, seed=1)
    assert generate(engine, other_image) == reference().greedy(other_image, NUM_NEW)
    assert engine.cached[4] == 6 // page_size * page_size
    assert computed(engine) == 2


def test_two_ranks_see_alike() -> None:
    engine = InProcessEngine(tiny_gemma3_vision(), tp_size=2, chunked_prefill_size=NUM_TOKENS + 4)
    for number, prompt in enumerate(PROMPTS, 1):
        add(engine, number, prompt)
    engine.run()
    assert [engine.tokens[number] for number in range(1, 7)] == expected()
