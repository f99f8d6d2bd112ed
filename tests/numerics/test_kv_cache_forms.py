"""Keys and values kept in fewer bits: how far the logits move, and that nothing else does."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from runtime.executor.kv_pool import pool_bytes_per_token
from runtime.executor.memory import Budget, size_pool
from runtime.ipc.messages import ContinueGeneration, PauseGeneration
from runtime.models.layers.build_context import BuildContext
from runtime.models.registry import read_model_spec
from tests.support.driver import Driver, load
from tests.support.engine import InProcessEngine
from tests.support.stored_numerics import divergence, prompt, reference
from tests.support.tiny_models import tiny_model

MODELS = ["llama", "qwen3", "gemma3", "mistral_window"]
# Most of the mean divergence from float32, of models whose numbers are random.
MOST = {"auto": 1e-6, "bf16": 2e-4, "int8": 5e-4, "fp8_e4m3": 0.02, "fp8_e5m2": 0.06}
NEVER = 10**9
SMALL = ["bf16", "int8", "fp8_e4m3", "fp8_e5m2"]


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_near_those_of_transformers(name: str) -> None:
    folder = tiny_model(name)
    weights = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    tokens = prompt(80)
    expected = reference(folder, {name: each.float() for name, each in weights.items()}, tokens)
    model, found = load(folder), {}
    for form, most in MOST.items():
        driver = Driver(model, kv_form=form)
        found[form] = divergence(expected, driver.prefill(driver.start(tokens)))
        assert found[form] < most, (form, found)
    # Each form is kept indeed, and costs what its bits say.
    assert max(found["auto"], found["bf16"]) < found["int8"] < found["fp8_e4m3"] < found["fp8_e5m2"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", SMALL)
def test_chunks_and_decoding_give_the_same_bits(form: str, dtype: str) -> None:
    tokens = prompt(50)
    driver = Driver(load(tiny_model("qwen3"), dtype), kv_form=form)
    whole = driver.prefill(driver.start(tokens))
    for chunk in (1, 7):
        assert torch.equal(driver.prefill(driver.start(tokens), chunk), whole)


def run(form: str, every: int) -> tuple[dict[int, list[int]], int]:
    """Tokens of requests that are all put back at each `every`-th step, and the cached ones."""
    engine = InProcessEngine(tiny_model("qwen3"), chunked_prefill_size=24, kv_cache_dtype=form)
    for first in (0, 4):
        # The second four find the first four's prompts in the cache.
        for number in range(first, first + 4):
            engine.add(number, [7 + number % 4, 11, 13] * 12, 12)
        for step in range(1, 1000):
            if not engine.scheduler.has_work:
                break
            if step % every == 0:
                engine.scheduler.receive([PauseGeneration(step, True), ContinueGeneration(step)])
            engine.scheduler.step()
        engine.run()
    return engine.tokens, sum(engine.cached.values())


@pytest.mark.parametrize("form", SMALL)
def test_prefixes_and_retractions_give_the_same_tokens(form: str) -> None:
    undisturbed, cached = run(form, NEVER)
    assert all(len(tokens) == 12 for tokens in undisturbed.values())
    assert [undisturbed[number] for number in range(4)] == [
        undisturbed[number] for number in range(4, 8)
    ]
    assert cached >= 4 * 32
    assert run(form, 3)[0] == undisturbed


def test_the_pool_holds_twice_the_tokens() -> None:
    """Of a memory that is given in bytes."""
    spec = read_model_spec(tiny_model("qwen3"))
    sizes = {
        form: size_pool(
            pool_bytes_per_token(
                spec,
                BuildContext(dtype=torch.bfloat16, device=torch.device("cpu"), kv_cache_dtype=form),
            ),
            page_size=16,
            max_total_tokens=None,
            max_running_requests=4096,
            context_len=4096,
            budget=Budget(1 << 20, 1 << 20, "a test"),
        ).num_pages
        for form in ("auto", "fp8_e4m3")
    }
    assert abs(sizes["fp8_e4m3"] - 2 * sizes["auto"]) <= 1
