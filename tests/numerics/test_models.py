"""Our decoders against `transformers` on the same tiny weights."""

from __future__ import annotations

import os
import random
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.models.attention.backend import ATTENTION_BACKENDS
from runtime.models.layers.rope import cos_sin_table
from runtime.models.registry import FAMILIES, read_model_spec
from tests.support.driver import Driver, load
from tests.support.fake_checkpoint import write_config
from tests.support.tiny_families import TINY_FAMILIES
from tests.support.tiny_models import TINY_MODELS, VOCAB_SIZE, tiny_model

FLOAT32 = [name for name, variant in TINY_MODELS.items() if variant.dtype == "float32"]
HALF = [name for name, variant in TINY_MODELS.items() if variant.dtype != "float32"]
# The first variant of each architecture goes through every batch size.
BY_ARCHITECTURE = list({v.architecture: n for n, v in reversed(TINY_MODELS.items())}.values())
# In Triton's interpreter (tests/kernels/test_triton_interpreted.py) the kernels run on the CPU.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = {"triton", "triton_invariant"}
NEEDS_GPU = {"flashinfer"} | (set() if INTERPRETED else TRITON)
BACKENDS = [name for name in ATTENTION_BACKENDS if name not in NEEDS_GPU]
TOLERANCE = 1e-4
NUM_NEW = 64

ours = cache(load)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Threads cost a tiny model more than they give, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def theirs(name: str):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model(name), dtype=torch.float32)
    return model.eval()


def their_logits(name: str, tokens: list[int]) -> Tensor:
    with torch.inference_mode():
        return theirs(name)(torch.tensor([tokens]), use_cache=False).logits[0]


def prompts(count: int, *, longest: int = 40) -> list[list[int]]:
    source = random.Random(count)
    lengths = [1, longest, *(source.randint(2, longest) for _ in range(count))][:count]
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def difference(mine: Tensor, reference: Tensor) -> float:
    """Largest deviation, relative to the largest logit of the row."""
    scale = reference.abs().amax(dim=-1, keepdim=True)
    return float(((mine - reference).abs() / scale).max())


def assert_greedy(name: str, prompt: list[int], tokens: list[int]) -> None:
    """Every generated token is `transformers`' most likely one after all that came before it."""
    expected = their_logits(name, tokens[:-1])[len(prompt) - 1 :].argmax(dim=-1)
    assert tokens[len(prompt) :] == expected.tolist()


def test_every_architecture_has_a_tiny_model():
    # What gives vectors or scores has its own, in `test_encoders`.
    generating = {name for name, family in FAMILIES.items() if family.texts}
    # Gemma 4 generates, but gives no vectors.
    generating |= {name for name in FAMILIES if name.startswith("Gemma4")}
    tiny = (*TINY_MODELS.values(), *TINY_FAMILIES.values())
    assert generating == {v.architecture for v in tiny}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.4}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 40.0, **MSCALE},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25, "truncate": False},
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16.0, "beta_slow": 2.0},
    ],
    ids=lambda rope: "-".join(str(value) for value in rope.values()),
)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotary_tables_equal_transformers(tmp_path: Path, rope: dict[str, object], theta: float):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {**rope, "rope_theta": theta}
    write_config(
        tmp_path,
        hidden_size=512,
        max_position_embeddings=32768,
        rope_parameters=parameters,
    )
    config = read_model_spec(tmp_path)
    table = cos_sin_table(config.rope, config.head_dim, 32768, torch.device("cpu"))
    reference = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    cos, sin = reference(torch.zeros(1), torch.arange(32768)[None])
    half = config.head_dim // 2
    assert torch.equal(table, torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=1))


@pytest.mark.parametrize(("longest", "given"), [(64, {}), (256, {}), (256, {"factor": 2.0})])
def test_long_rotary_tables_equal_transformers(tmp_path: Path, longest: int, given: dict):
    """Factors are those of the longest sequence that is served."""
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    factors = {"short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [1, 3, 9.5, 27]}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    write_config(
        tmp_path,
        architectures=["Phi3ForCausalLM"],
        model_type="phi3",
        **sizes,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        partial_rotary_factor=0.5,
        rope_theta=500.0,
        rope_parameters=None,
        rope_scaling={"type": "longrope", **factors, **given},
    )
    config = read_model_spec(tmp_path)
    assert config.context_len == 256
    table = cos_sin_table(config.rope, config.rotary_dim, longest + 1, torch.device("cpu"))
    reference = Phi3RotaryEmbedding(Phi3Config.from_pretrained(tmp_path))
    cos, sin = reference(torch.zeros(1), torch.arange(longest)[None])
    assert torch.equal(table[:longest], torch.cat((cos[0, :, :4], sin[0, :, :4]), dim=1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FLOAT32)
def test_logits_equal_transformers(name: str, backend: str):
    driver = Driver(ours(tiny_model(name)), backend)
    for tokens in prompts(3, longest=150):
        logits = driver.prefill(driver.start(tokens))
        assert difference(logits, their_logits(name, tokens)) < TOLERANCE


@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_close_to_float32(name: str):
    dtype = TINY_MODELS[name].dtype
    driver = Driver(ours(tiny_model(name), dtype))
    for tokens in prompts(3):
        logits = driver.prefill(driver.start(tokens))
        assert logits.dtype == torch.float32
        assert difference(logits, their_logits(name, tokens)) < 0.06


@pytest.mark.parametrize("name", HALF)
def test_half_precision_checkpoints_run_in_float32(name: str):
    driver = Driver(ours(tiny_model(name), "float32"))
    for tokens in prompts(2):
        logits = driver.prefill(driver.start(tokens))
        assert difference(logits, their_logits(name, tokens)) < TOLERANCE


@pytest.mark.parametrize("name", BY_ARCHITECTURE)
def test_greedy_tokens_equal_transformers_in_every_batch_size(name: str):
    batch = prompts(16)
    sequences = Driver(ours(tiny_model(name))).greedy_in_growing_batches(batch, 4)
    for prompt, sequence in zip(batch, sequences, strict=True):
        assert_greedy(name, prompt, sequence.tokens)


@pytest.mark.parametrize("name", [name for name in FLOAT32 if name not in BY_ARCHITECTURE])
def test_greedy_tokens_equal_transformers(name: str):
    driver = Driver(ours(tiny_model(name)))
    batch = prompts(4)
    sequences = [driver.start(prompt) for prompt in batch]
    driver.greedy(sequences, NUM_NEW)
    for prompt, sequence in zip(batch, sequences, strict=True):
        assert_greedy(name, prompt, sequence.tokens)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", [*BY_ARCHITECTURE, "mistral_window", "qwen2_window", "gemma3_pattern"]
)
def test_prefill_whole_chunked_and_cached_agree(name: str, backend: str):
    driver = Driver(ours(tiny_model(name)), backend, page_size=8)
    # The interpreter takes long for each of the steps of one token.
    tokens = prompts(2, longest=29 if INTERPRETED else 61)[1]
    first = driver.start(tokens)
    whole = driver.prefill(first)
    for chunk in (1, 7, 8, 24):
        assert difference(driver.prefill(driver.start(tokens), chunk), whole) < 1e-5
    cached = driver.start(tokens, shared=first)
    num_cached = cached.computed
    assert num_cached == len(tokens) // 8 * 8
    assert difference(driver.prefill(cached), whole[num_cached:]) < 1e-5


@pytest.mark.parametrize("name", [*BY_ARCHITECTURE, "mistral_window"])
def test_a_retracted_sequence_goes_on_where_it_stopped(name: str):
    driver = Driver(ours(tiny_model(name)))
    prompt, other = prompts(2)
    undisturbed = driver.start(prompt)
    driver.greedy([undisturbed], 40)

    retracted, neighbour = driver.start(prompt), driver.start(other)
    driver.greedy([retracted, neighbour], 20)
    driver.release(retracted)
    driver.greedy([neighbour], 5)
    # The recomputed prompt shares its step with a decode.
    driver.greedy([retracted, neighbour], 20)
    assert retracted.tokens == undisturbed.tokens
    assert_greedy(name, other, neighbour.tokens)


def test_prefill_and_decode_mix_in_one_step():
    driver = Driver(ours(tiny_model("qwen3")))
    running, joining = (driver.start(prompt) for prompt in prompts(2))
    alone = Driver(driver.model)
    expected = [alone.start(running.tokens), alone.start(joining.tokens)]
    driver.greedy([running], 8)
    driver.greedy([joining, running], 8)
    alone.greedy(expected[:1], 16)
    alone.greedy(expected[1:], 8)
    assert [running.tokens, joining.tokens] == [one.tokens for one in expected]
