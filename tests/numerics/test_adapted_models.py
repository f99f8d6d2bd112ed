"""Models of `transformers` on our layers, against `transformers` itself on the same weights."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from runtime.checkpoint.model_spec import PagedState
from runtime.errors import StartupError
from runtime.models.registry import read_model_spec
from runtime.models.transformers_impl.model import AdaptedForCausalLM
from tests.support.adapted_models import ADAPTED_MODELS, ONE_RANK, adapted_model
from tests.support.driver import Driver, load
from tests.support.fake_checkpoint import write_config
from tests.support.tiny_models import VOCAB_SIZE, tiny_model
from tests.support.two_ranks import TwoRanks

ADAPTER = {"model_impl": "transformers"}
# Ours, through the adapter: the same weights have another way.
OURS = ["llama", "llama_biased", "llama_dynamic", "qwen2_window", "qwen2_yarn", "qwen3", "gemma3"]
NAMES = [*ADAPTED_MODELS, *OURS]
TOLERANCE = 1e-5
ours = cache(load)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost a tiny model more than they give, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def folder_of(name: str) -> Path:
    return adapted_model(name) if name in ADAPTED_MODELS else tiny_model(name)


@cache
def adapted(name: str) -> Any:
    model = load(folder_of(name), overrides=ADAPTER)
    assert isinstance(model, AdaptedForCausalLM)
    return model


@cache
def theirs(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=torch.float32).eval()


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


@pytest.mark.parametrize("name", NAMES)
def test_whole_chunked_and_cached_equal_transformers(name: str) -> None:
    driver = Driver(adapted(name), page_size=8)
    tokens = prompts(2, 61)[1]
    expected = their_logits(name, tokens)
    first = driver.start(tokens)
    assert_near(driver.prefill(first), expected)
    for chunk in (1, 7):
        assert_near(driver.prefill(driver.start(tokens), chunk), expected)
    cached = driver.start(tokens, shared=first)
    num_cached = cached.computed
    assert num_cached == len(tokens) // 8 * 8
    assert_near(driver.prefill(cached), expected[num_cached:])


@pytest.mark.parametrize("name", NAMES)
def test_batches_and_retracted_sequences_equal_transformers(name: str) -> None:
    model = adapted(name)
    for size in (1, 16):
        driver = Driver(model)
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
    sequences = Driver(adapted(name)).greedy_in_growing_batches(batch, 4)
    for prompt, sequence in zip(batch, sequences, strict=True):
        assert_greedy(name, prompt, sequence.tokens)


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_transformers(name: str) -> None:
    folder = folder_of(name)
    spec = read_model_spec(folder, ADAPTER)
    if name in ONE_RANK:
        with pytest.raises(StartupError, match=r"--tp-size 2: .* has no plan for ranks"):
            spec.check(2, deterministic=False)
        return
    spec.check(2, deterministic=False)
    assert not spec.uneven_parts(2)
    ranks = TwoRanks(folder, ADAPTER)
    tokens = prompts(2, 61)[1]
    for logits in ranks.prefill(tokens, 33):
        assert_near(logits, their_logits(name, tokens))


@pytest.mark.parametrize("name", NAMES)
def test_all_weights_are_read_back_as_the_files_have_them(name: str) -> None:
    model = adapted(name)
    holders, spec = dict(model.holders()), model.spec
    files: dict[str, Tensor] = {}
    for path in folder_of(name).glob("*.safetensors"):
        files |= {spec.canonical(key): each for key, each in load_file(path).items()}
    assert {weight.name for weight in spec.weights} <= set(files)
    for weight in spec.weights:
        holder, _, parameter = weight.target.rpartition(".")
        part = holders[holder].part(parameter, weight.shard)
        assert torch.equal(part, files[weight.name].float()), weight.name


@pytest.mark.parametrize("name", ["llama", "qwen3", "granite", "gpt_neox", "gemma2", "phi3"])
def test_half_precision_is_close_to_float32(name: str) -> None:
    driver = Driver(load(folder_of(name), "bfloat16", ADAPTER))
    for tokens in prompts(3):
        logits, expected = driver.prefill(driver.start(tokens)), their_logits(name, tokens)
        assert logits.dtype == torch.float32
        scale = expected.abs().amax(dim=-1, keepdim=True)
        assert float(((logits - expected).abs() / scale).max()) < 0.1


@pytest.mark.parametrize("name", ["olmo2", "gpt_neox", "glm4_moe", "gpt2"])
def test_products_are_quantized_like_those_of_a_family(name: str) -> None:
    model = load(folder_of(name), overrides={**ADAPTER, "quantization": "fp8"})
    names = [weight.name for weight in model.spec.weights if weight.kind == "scale"]
    # Matrices that only the model's own code multiplies stay as they are.
    assert bool(names) == (name != "gpt2")
    assert not any("embed" in each or "norm" in each for each in names)
    driver = Driver(model)
    tokens = prompts(2, 61)[1]
    logits, expected = driver.prefill(driver.start(tokens)), their_logits(name, tokens)
    scale = expected.abs().amax(dim=-1, keepdim=True)
    assert float(((logits - expected).abs() / scale).mean()) < 0.06


def test_the_quick_way_is_that_of_our_family() -> None:
    """Where every layer is known, nothing of the model's own code is left between them."""
    for name in ("llama", "qwen3"):
        described = read_model_spec(tiny_model(name), ADAPTER).described  # type: ignore[attr-defined]
        assert not described.as_they_are
        tokens = prompts(2, 61)[1]
        mine, family = Driver(adapted(name)), Driver(ours(tiny_model(name)))
        one, other = (each.prefill(each.start(tokens)) for each in (mine, family))
        assert torch.equal(one, other)


def test_states_follow_from_the_models_own_code() -> None:
    spec = read_model_spec(adapted_model("gemma2"), ADAPTER)
    assert spec.impl == "transformers"
    assert list(spec.layer_states) == [PagedState(2, 32, window) for window in (8, None, 8)]
    assert [each.softcap for each in spec.described.attention] == [2.0] * 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("model_type", "architecture", "options", "why"),
    [
        ("bloom", "BloomForCausalLM", {}, "does not use the attention interface"),
        ("mpt", "MptForCausalLM", {}, "does not use the attention interface"),
        ("falcon", "FalconForCausalLM", {"alibi": True}, "does not use the attention interface"),
        ("mamba", "MambaForCausalLM", {}, "its layers keep a recurrent state"),
        ("bart", "BartForCausalLM", {}, ""),
        ("llama4_text", "Llama4ForCausalLM", {}, "its layers have chunked_attention"),
        ("llama", "LlamaForCausalLM", {"num_attention_heads": 5}, "transformers cannot build it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_one_line(
    tmp_path: Path, model_type: str, architecture: str, options: dict[str, Any], why: str
) -> None:
    write_config(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values.update(model_type=model_type, architectures=[architecture], pad_token_id=0, **options)
    path.write_text(json.dumps(values))
    with pytest.raises(StartupError) as caught:
        read_model_spec(tmp_path, ADAPTER)
    assert why in caught.value.message
    assert architecture in caught.value.message
    assert "\n" not in caught.value.message


def test_headrace_alone_refuses_what_has_no_family() -> None:
    with pytest.raises(StartupError, match="'SeedOssForCausalLM' is not supported"):
        read_model_spec(adapted_model("seed_oss"), {"model_impl": "headrace"})
