"""Pages behind windows are reused, in all layers or in windowed ones, and no token changes."""

from functools import cache
from typing import Any

import pytest
import torch

from runtime.extras.logprobs.positions import LogprobSpec
from tests.numerics.test_engine import NUM_NEW, PROMPTS, reference_tokens
from tests.support.engine import InProcessEngine
from tests.support.tiny_families import tiny_family
from tests.support.tiny_models import tiny_model

# Four requests of 3 to 24 prompt tokens and 64 new ones; a window is 8 tokens, a page 4.
POOL = {"max_total_tokens": 160, "page_size": 4}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"disable_radix_cache": True},
        {"chunked_prefill_size": 5},
        {"attention_backend": "torch"},
    ],
)
def test_a_small_pool_serves_long_outputs(options: dict[str, Any], overlap: bool) -> None:
    expected = reference_tokens("mistral_window")
    engine = InProcessEngine(tiny_model("mistral_window"), overlap=overlap, **POOL, **options)
    for _ in range(2):
        for i in range(4):
            engine.add(i + 1, PROMPTS[i], NUM_NEW, ignore_eos=True)
        engine.run()
        for i in range(4):
            assert engine.tokens[i + 1] == expected[i]
            assert engine.retractions[i + 1] == 0


def test_the_same_pool_is_too_small_for_a_model_that_sees_all() -> None:
    expected = reference_tokens("mistral")
    engine = InProcessEngine(tiny_model("mistral"), **POOL)
    for i in range(4):
        engine.add(i + 1, PROMPTS[i], NUM_NEW, ignore_eos=True)
    engine.run()
    assert [engine.tokens[i + 1] for i in range(4)] == expected[:4]
    assert any(engine.retractions.values())


def test_a_prompt_longer_than_the_window_is_found_again() -> None:
    engine = InProcessEngine(tiny_model("mistral_window"), overlap=True, page_size=4)
    for request_id in (1, 2):
        engine.add(request_id, PROMPTS[8], NUM_NEW, ignore_eos=True)
        engine.run()
    assert engine.tokens[1] == engine.tokens[2] == reference_tokens("mistral_window")[8]
    assert engine.cached[2] >= len(PROMPTS[8]) - 5


# ---- pages of their own for windowed layers, beside layers that see all ----

MIXED = dict.fromkeys(("gemma3", "qwen2_window"), tiny_model) | dict.fromkeys(
    ("cohere2", "gemma2", "gpt_oss", "olmo3_yarn"), tiny_family
)
# Pages of 4 tokens; window pages for few requests at a time.
OWN_PAGES = {"page_size": 4, "max_total_tokens": 2048, "swa_full_tokens_ratio": 0.08}
COMMON = PROMPTS[9][:41]
# Up to 108 tokens; two that part in the middle of a page, behind a window.
TEXTS = [*PROMPTS, COMMON + PROMPTS[4], COMMON + PROMPTS[2]]
WAYS: dict[str, dict[str, Any]] = {
    "whole": {"chunked_prefill_size": 128, "swa_full_tokens_ratio": 0.5},
    "chunks of 7": {"chunked_prefill_size": 7},
    "chunks of 30, overlap": {"chunked_prefill_size": 30, "overlap": True},
    "no tree": {"chunked_prefill_size": 11, "disable_radix_cache": True},
    "retracted": {
        "max_total_tokens": 300,
        "swa_full_tokens_ratio": 0.9,
        "chunked_prefill_size": 13,
    },
    "pages of 1, overlap": {"page_size": 1, "chunked_prefill_size": 20, "overlap": True},
}


@cache
def reference(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    folder = MIXED[name](name)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_greedy(name: str, prompt: list[int], answer: list[int]) -> None:
    """Each token is `transformers`' most likely one after all that came before it."""
    tokens = torch.tensor([prompt + answer[:-1]])
    with torch.inference_mode():
        logits = reference(name)(tokens, use_cache=False).logits[0]
    assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()


def with_own_pages(name: str, **options: Any) -> InProcessEngine:
    engine = InProcessEngine(MIXED[name](name), **{**OWN_PAGES, **options})
    assert engine.executor.size.num_window_pages > 0
    assert len({len(layer.k) for layer in engine.executor.kv}) == 2
    return engine


@cache
def undisturbed(name: str) -> list[list[int]]:
    engine = InProcessEngine(MIXED[name](name), disable_radix_cache=True)
    answers = [engine.generate(prompt, 24, ignore_eos=True) for prompt in TEXTS]
    for prompt, answer in zip(TEXTS, answers, strict=True):
        assert_greedy(name, prompt, answer)
    return answers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MIXED)
def test_own_pages_of_windowed_layers_do_not_show(name: str, way: str) -> None:
    engine = with_own_pages(name, **WAYS[way])
    for first_id in (1, 101):
        for i, prompt in enumerate(TEXTS):
            engine.add(first_id + i, prompt, 24, ignore_eos=True)
        engine.run()
        for i, answer in enumerate(undisturbed(name)):
            assert engine.tokens[first_id + i] == answer
    if way == "retracted":
        assert engine.shared["num_retractions_total"] > 0
    if way == "whole":
        assert engine.cached[117] == (len(TEXTS[16]) - 1) // 4 * 4


@pytest.mark.parametrize("name", MIXED)
def test_a_step_that_fails_leaves_the_windows_of_others(name: str) -> None:
    engine = with_own_pages(name, chunked_prefill_size=40, swa_full_tokens_ratio=0.2)
    num_failures = 0

    def fail_afterwards(forward: Any, batch: Any) -> Any:
        nonlocal num_failures
        hidden = forward(batch)
        if len(batch.seq_lens) > 1:
            num_failures += 1
            raise RuntimeError("planted")
        return hidden

    for i, prompt in enumerate(TEXTS[:6]):
        engine.add(i, prompt, 24, ignore_eos=True)
    with engine.computing(fail_afterwards):
        engine.run()
    assert num_failures > 12
    assert [engine.tokens[i] for i in range(6)] == undisturbed(name)[:6]


@pytest.mark.parametrize("name", MIXED)
def test_cached_turns_have_the_bits_of_uncached_ones(name: str) -> None:
    options: dict[str, Any] = {"deterministic": True, "chunked_prefill_size": 9}
    engine = with_own_pages(name, **options)
    alone = InProcessEngine(MIXED[name](name), disable_radix_cache=True, deterministic=True)
    history: list[int] = []
    for turn in range(1, 5):
        prompt = history + PROMPTS[3]
        for each in (engine, alone):
            each.add(turn, prompt, 20, ignore_eos=True, logprobs=LogprobSpec(top_num=2))
            each.run()
        assert engine.tokens[turn] == alone.tokens[turn]
        assert engine.outputs[turn] == alone.outputs[turn]
        # What the turn before computed: all but its last token, in whole pages.
        assert engine.cached[turn] == max(len(history) - 1, 0) // 4 * 4
        history = prompt + engine.tokens[turn]
