"""Families whose layers have parts of their own, against `transformers` on the same weights.

Every line of `TINY_FAMILIES` goes through every test here.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime.models.model import CausalLM
from runtime.models.registry import read_model_spec
from runtime.weights.live_weights import LiveWeights
from tests.support.driver import Driver, load
from tests.support.engine import InProcessEngine
from tests.support.tiny_families import TINY_FAMILIES, tiny_family
from tests.support.tiny_models import VOCAB_SIZE, changed_weights
from tests.support.two_ranks import TwoRanks

NAMES = list(TINY_FAMILIES)
TOLERANCE = 1e-5
ours = cache(load)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost a tiny model more than they give, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def theirs(name: str) -> Any:
    import transformers

    model_class = getattr(transformers, TINY_FAMILIES[name].architecture)
    return model_class.from_pretrained(tiny_family(name), dtype=torch.float32).eval()


def their_logits(name: str, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = theirs(name)(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    source = random.Random(count)
    lengths = [1, longest, *(source.randint(2, longest) for _ in range(count))][:count]
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def assert_near(mine: Tensor, reference: Tensor) -> None:
    scale = reference.abs().amax(dim=-1, keepdim=True)
    assert float(((mine - reference).abs() / scale).max()) < TOLERANCE


def assert_greedy(name: str, prompt: list[int], tokens: list[int]) -> None:
    """Every generated token is the most likely one after all that came before it."""
    expected = their_logits(name, tokens[:-1])[len(prompt) - 1 :].argmax(dim=-1)
    assert tokens[len(prompt) :] == expected.tolist()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_whole_chunked_and_cached_equal_transformers(name: str, backend: str) -> None:
    driver = Driver(ours(tiny_family(name)), backend, page_size=8)
    assert driver.model.spec.impl == "headrace"
    tokens = prompts(2, 61)[1]
    expected = their_logits(name, tokens)
    first = driver.start(tokens)
    assert_near(driver.prefill(first), expected)
    assert_near(driver.prefill(driver.start(tokens), 7), expected)
    assert_near(driver.prefill(driver.start(tokens[:21]), 1), expected[:21])
    cached = driver.start(tokens, shared=first)
    num_cached = cached.computed
    assert num_cached == len(tokens) // 8 * 8
    assert_near(driver.prefill(cached), expected[num_cached:])


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_retracted_sequences_equal_transformers(name: str) -> None:
    for size in (1, 16):
        driver = Driver(ours(tiny_family(name)))
        batch = prompts(size)
        sequences = [driver.start(prompt) for prompt in batch]
        driver.greedy(sequences, 6)
        # The recomputed prompt shares its step with those that decode.
        driver.release(sequences[-1])
        driver.greedy(sequences, 6)
        for prompt, sequence in zip(batch, sequences, strict=True):
            assert_greedy(name, prompt, sequence.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_every_batch_size_equals_transformers(name: str) -> None:
    batch = prompts(16)
    sequences = Driver(ours(tiny_family(name))).greedy_in_growing_batches(batch, 4)
    for prompt, sequence in zip(batch, sequences, strict=True):
        assert_greedy(name, prompt, sequence.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_retracts_and_finds_prefixes(name: str) -> None:
    batch = [prompt * 2 for prompt in prompts(6, 30)[1:]]
    engine = InProcessEngine(
        tiny_family(name), max_total_tokens=288, chunked_prefill_size=16, page_size=8
    )
    for index, prompt in enumerate(batch):
        engine.add(index + 1, prompt, 24, ignore_eos=True)
    engine.run()
    assert engine.shared["num_retractions_total"] > 0
    for index, prompt in enumerate(batch):
        assert_greedy(name, prompt, prompt + engine.tokens[index + 1])
    again = engine.generate(batch[0], 4, ignore_eos=True)
    assert again == engine.tokens[1][:4]
    assert engine.cached[len(batch) + 1] > 0


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_transformers(name: str) -> None:
    folder = tiny_family(name)
    assert not read_model_spec(folder).uneven_parts(2)
    tokens = prompts(2, 61)[1]
    for logits in TwoRanks(folder).prefill(tokens, 33):
        assert_near(logits, their_logits(name, tokens))


@pytest.mark.parametrize("name", NAMES)
def test_all_weights_are_read_back_as_the_files_have_them(name: str) -> None:
    model = ours(tiny_family(name))
    holders, spec = dict(model.holders()), model.spec
    files = {spec.canonical(key): each for key, each in load_files(tiny_family(name)).items()}
    assert {weight.name for weight in spec.weights} <= set(files)
    for weight in spec.weights:
        holder, _, parameter = weight.target.rpartition(".")
        part = holders[holder].part(parameter, weight.shard)
        assert torch.equal(part, files[weight.name].float()), weight.name


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_replaced_from_disk_and_by_a_trainer(name: str, tmp_path: Path) -> None:
    folder, other = tiny_family(name), changed_weights(tiny_family(name), tmp_path / "other")
    model, tokens = load(folder), prompts(2, 61)[1]
    weights = LiveWeights(model, None, lambda: None, tmp_path / "spilt")
    before = logits(model, tokens)
    weights.load_folder(other)
    weights.keep()
    # What is computed from weights, such as a packed copy, is renewed with them.
    assert torch.equal(logits(model, tokens), logits(load(other), tokens))
    sent = load_files(folder)
    weights.load_tensors({key: each.shape for key, each in sent.items()}, sent.items())
    weights.keep()
    assert torch.equal(logits(model, tokens), before)


def logits(model: CausalLM, tokens: list[int]) -> Tensor:
    driver = Driver(model)
    return driver.prefill(driver.start(tokens))


def load_files(folder: Path) -> dict[str, Tensor]:
    files: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        files |= load_file(path)
    return files
