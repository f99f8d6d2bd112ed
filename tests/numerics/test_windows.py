"""If every layer has a window, pages behind it are reused, and no token changes."""

from typing import Any

import pytest

from tests.numerics.test_engine import NUM_NEW, PROMPTS, reference_tokens
from tests.support.engine import InProcessEngine
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
