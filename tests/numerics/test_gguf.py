"""GGUF files against `transformers` with the numbers that their blocks stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from runtime.checkpoint.gguf.types import BLOCK_TYPES
from runtime.models.layers.build_context import BuildContext
from runtime.models.quantization.gguf.front import StoredForms
from runtime.models.registry import read_model_spec
from runtime.weights.load_model import load_model
from tests.support.driver import Driver, load
from tests.support.gguf_models import write_gguf
from tests.support.stored_numerics import WIDE, divergence, prompt, reference, variant
from tests.support.two_ranks import TwoRanks

# Files cannot tell these two apart.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": {},
    "llama_tied": {},
    "llama_biased": {},
    "llama_llama3": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    # Everything that a model of the family may have.
    "gemma4_inputs": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "granite": {},
    # The files cannot tell which layers rotate: the fourth does not.
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]},
    "granite_moe": {},
    "glm4": {"attention_bias": True},
    "cohere2": {},
    "olmo2": {},
    # Only layers without a window are stretched; the files have one base.
    "olmo3_yarn": {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        }
    },
    "gpt_oss": {},
    "lfm2": {"conv_bias": False},
    "deepseek_v2": {"rope_parameters": _YARN},
    "deepseek_v3": {"rope_parameters": _YARN},
    "glm4_moe_normed": {
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    "minimax_m2": {},
    "ministral3": {},
    "phi3_short": {},
    "phi3": {"sliding_window": 8},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "starcoder2_tied": {},
    "olmoe": {},
    "granite_hybrid": {},
    "granite_hybrid_moe": {},
    "nemotron_h": {},
    "qwen3_next": {},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}


# `kv_b_proj` as old converters wrote it, or split.
CASES = [(name, False) for name in ARCHITECTURES] + [("deepseek_v2", True), ("deepseek_v3", True)]


def logits(model_path: Path, tokens: list[int]) -> Tensor:
    driver = Driver(load(model_path))
    return driver.prefill(driver.start(tokens))


@pytest.mark.parametrize(("name", "old_latents"), CASES)
def test_every_architecture_in_plain_numbers(name: str, old_latents: bool, tmp_path: Path) -> None:
    folder = variant(name, ARCHITECTURES[name])
    path = tmp_path / "model.gguf"
    weights = write_gguf(folder, path, old_latents=old_latents)
    tokens = prompt()
    expected = reference(folder, weights, tokens)
    found = logits(path, tokens)
    scale = expected.abs().amax(dim=-1, keepdim=True)
    assert float(((found - expected).abs() / scale).max()) < 1e-4


@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "F16", "BF16"])
def test_every_type(kind: str, tmp_path: Path) -> None:
    folder = variant("qwen3", {**WIDE, "tie_word_embeddings": True})
    path = tmp_path / "model.gguf"
    weights = write_gguf(folder, path, lambda name: kind)
    tokens = prompt()
    expected = reference(folder, weights, tokens)
    found = logits(path, tokens)
    assert divergence(expected, found) < 0.005
    assert float((expected.argmax(-1) == found.argmax(-1)).float().mean()) > 0.85


MIXED = {
    "attn_q": "Q4_K", "attn_k": "Q5_0", "attn_v": "Q8_0", "attn_output": "Q6_K",
    "ffn_gate": "Q4_1", "ffn_up": "Q5_K", "ffn_down": "Q3_K", "token_embd": "Q6_K",
}  # fmt: skip


def mixed(name: str) -> str:
    """Another type for each projection, so that fused products have parts of several."""
    stem = name.removesuffix(".weight").rpartition(".")[2].removesuffix("_exps")
    return MIXED.get(stem.removesuffix("_shexp"), "Q8_0")


@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
def test_types_mix_within_a_layer(name: str, tmp_path: Path) -> None:
    options: dict[str, object] = dict(WIDE)
    if name == "qwen2_moe":
        options = {
            "hidden_size": 256,
            "intermediate_size": 256,
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
        }
    folder = variant(name, options)
    path = tmp_path / "model.gguf"
    weights = write_gguf(folder, path, mixed)
    tokens = prompt()
    found = logits(path, tokens)
    assert divergence(reference(folder, weights, tokens), found) < 0.005


def test_experts_with_biases_stay_in_blocks(tmp_path: Path) -> None:
    """The form in which gpt-oss is published: experts in MXFP4, the rest in plain numbers."""
    folder = variant("gpt_oss", {})
    path = tmp_path / "model.gguf"
    weights = write_gguf(folder, path, lambda name: "MXFP4" if "_exps" in name else "F32")
    tokens = prompt()
    expected = reference(folder, weights, tokens)
    assert divergence(expected, logits(path, tokens)) < 0.005
    # Ranks take their rows of the biases, too.
    for found in TwoRanks(path).prefill(tokens):
        assert divergence(expected, found) < 0.005


def test_blocks_of_the_latents_expansion(tmp_path: Path) -> None:
    options: dict[str, object] = {
        "rope_parameters": _YARN,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    }
    folder = variant("deepseek_v3", options)
    path = tmp_path / "model.gguf"
    weights = write_gguf(
        folder, path, lambda name: "Q8_0" if "k_b" in name or "v_b" in name else "F32"
    )
    tokens = prompt()
    expected = reference(folder, weights, tokens)
    assert divergence(expected, logits(path, tokens)) < 0.005
    for found in TwoRanks(path).prefill(tokens):
        assert divergence(expected, found) < 0.005


RECURRENT = [
    *(("qwen3_next", False), ("qwen3_next", True), ("qwen3_5", False), ("qwen3_5_moe", False)),
    *(("granite_hybrid_moe", False), ("nemotron_h", False)),
]


# CPUs without AMX round rows to 8 bits, which changes these random models by up to 0.05: routers
# choose other experts, and logits are large. A matrix in reverse order changes them by 0.8 to 10.
ROUNDED = {"qwen3_5_moe": 0.1, "granite_hybrid_moe": 0.1, "nemotron_h": 0.1}


@pytest.mark.parametrize(("name", "is_old"), RECURRENT)
def test_recurrent_layers_stay_in_blocks(name: str, is_old: bool, tmp_path: Path) -> None:
    folder = variant(name, {})
    path = tmp_path / "model.gguf"
    parts = ("attn_qkv", "attn_gate", "ssm_in", "ssm_ba", "ssm_alpha", "ssm_beta", "ssm_out")
    in_blocks = tuple(f".{part}.weight" for part in parts)
    weights = write_gguf(
        folder, path, lambda name: "Q8_0" if name.endswith(in_blocks) else "F32", is_old=is_old
    )
    tokens = prompt()
    expected = reference(folder, weights, tokens)
    assert divergence(expected, logits(path, tokens)) < ROUNDED.get(name, 0.005)
    spec = read_model_spec(path)
    assert isinstance(spec.quantization, StoredForms)
    assert sum(spec.quantization.form(each) == "Q8_0" for each in spec.weights) >= 6
    if spec.architecture.startswith("Qwen3_5"):
        assert spec.uneven_parts(2) == ["4 value heads in the order of a GGUF file"]
        return
    for found in TwoRanks(path).prefill(tokens):
        assert divergence(expected, found) < ROUNDED.get(name, 0.005)


def test_chunks_and_batches_give_the_same(tmp_path: Path) -> None:
    folder = variant("llama", WIDE)
    path = tmp_path / "model.gguf"
    write_gguf(folder, path, mixed)
    tokens = prompt()
    driver = Driver(load(path))
    whole = driver.prefill(driver.start(tokens))
    for chunk in (1, 7):
        assert torch.equal(driver.prefill(driver.start(tokens), chunk), whole)


def test_blocks_stay_blocks(tmp_path: Path) -> None:
    """Memory is what is stored, and what was stored comes back bit for bit."""
    folder = variant("llama", WIDE)
    path = tmp_path / "model.gguf"
    weights = write_gguf(folder, path, mixed)
    spec = read_model_spec(path)
    model = load_model(
        path,
        spec,
        BuildContext(dtype=torch.float32, device=torch.device("cpu")),
        lambda share: None,
    )
    holders = dict(model.holders())
    for weight in spec.logical_weights:
        holder, _, parameter = weight.target.rpartition(".")
        values = holders[holder].values(parameter, weight.shard)
        assert torch.equal(values.float(), weights[weight.name]), weight.name
    held = sum(holder.size_bytes for holder in holders.values())
    assert held < 0.4 * 4 * spec.num_parameters


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_cut_where_blocks_end(rank: int, tmp_path: Path) -> None:
    folder = variant("llama", {**WIDE, "intermediate_size": 512})
    path = tmp_path / "model.gguf"
    # Of `attn_output`, 256 columns wide, half a row is half a block: it is widened, not cut.
    weights = write_gguf(folder, path, mixed)
    spec = read_model_spec(path)
    context = BuildContext(
        dtype=torch.float32,
        device=torch.device("cpu"),
        tp_rank=rank,
        tp_size=2,
        all_reduce=lambda x: x,
    )
    model = load_model(path, spec, context, lambda share: None)
    holders = dict(model.holders())
    for weight in spec.logical_weights:
        holder, _, parameter = weight.target.rpartition(".")
        shard = dict(holders[holder].parameters())[parameter].shards[weight.shard]
        values = holders[holder].values(parameter, weight.shard)
        expected = shard.local_part(weights[weight.name])
        assert torch.equal(values.float(), expected), weight.name
