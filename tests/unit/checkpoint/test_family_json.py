"""Readers of families: what absent keys mean, and one line for what cannot run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint.model_spec import (
    LatentState,
    ModelSpec,
    NoState,
    PagedState,
    RecurrentState,
)
from runtime.errors import StartupError
from runtime.models.decoder.spec import DecoderSpec
from runtime.models.registry import read_model_spec

# Keys that every file has.
SIZES = {
    "vocab_size": 1000,
    "hidden_size": 4096,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
}
FAMILIES = [
    "Cohere2ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma4ForCausalLM",
    "Glm4ForCausalLM",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GlmForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "Phi3ForCausalLM",
    "Qwen3_5ForCausalLM",
    "SmolLM3ForCausalLM",
    "Starcoder2ForCausalLM",
]


def read(folder: Path, architecture: str, values: dict[str, Any]) -> ModelSpec:
    text = json.dumps({**values, "architectures": [architecture], "model_type": "one"})
    (folder / "config.json").write_text(text)
    return read_model_spec(folder)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_absent_keys_mean_what_they_do_in_transformers(tmp_path: Path, architecture: str) -> None:
    import transformers

    made = getattr(transformers, architecture).config_class(**SIZES)
    # As a folder is written: with every key, and the number of extra layers under its file's name.
    full = json.loads(made.to_json_string(use_diff=False))
    full["dtype"] = "float32"
    full.pop("num_mtp_layers", None)
    full.pop("num_nextn_predict_layers", None)
    ends = {key: full[key] for key in ("eos_token_id", "bos_token_id") if key in full}
    whole = read(tmp_path, architecture, full)
    short = read(tmp_path, architecture, {**SIZES, **ends})
    assert replace(short, raw={}) == replace(whole, raw={})
    assert short.weights == whole.weights


def test_latents_are_whole_on_every_rank(tmp_path: Path) -> None:
    spec = read(tmp_path, "DeepseekV3ForCausalLM", SIZES)
    assert set(spec.layer_states) == {LatentState(1, 576, is_whole=True)}
    assert spec.uneven_parts(32) == []
    assert spec.uneven_parts(5) == [
        "32 attention heads",
        "1024 feed-forward rows",
        "2048 rows of the shared expert",
        "2048 rows of an expert",
    ]


@pytest.mark.parametrize("architecture", ["DeepseekV2ForCausalLM", "Glm4MoeLiteForCausalLM"])
def test_latents_have_no_invariant_products(tmp_path: Path, architecture: str) -> None:
    spec = read(tmp_path, architecture, SIZES)
    spec.check(1, deterministic=False)
    with pytest.raises(StartupError, match=r"deterministic-inference: .*latents") as caught:
        spec.check(1, deterministic=True)
    assert "\n" not in caught.value.message
    read(tmp_path, "Glm4MoeForCausalLM", SIZES).check(1, deterministic=True)


def test_joint_norms_are_not_invariant_on_several_ranks(tmp_path: Path) -> None:
    spec = read(tmp_path, "Olmo2ForCausalLM", SIZES)
    spec.check(2, deterministic=False)
    spec.check(1, deterministic=True)
    with pytest.raises(StartupError, match=r"deterministic-inference: .*--tp-size 2") as caught:
        spec.check(2, deterministic=True)
    assert "\n" not in caught.value.message


def test_groups_of_heads_of_mamba_are_shared_by_ranks(tmp_path: Path) -> None:
    """As Granite 4.0 H Small: one group, so that a norm covers all ranks."""
    kinds = ["mamba"] * 5 + ["attention"]
    values = {**SIZES, "layers_block_type": kinds, "mamba_n_heads": 128, "mamba_d_state": 128}
    spec = read(tmp_path, "GraniteMoeHybridForCausalLM", values)
    assert [isinstance(state, PagedState) for state in spec.layer_states] == [False] * 5 + [True]
    state = spec.layer_states[0]
    assert isinstance(state, RecurrentState)
    assert [part.shape_of_rank(4) for part in state.parts] == [(3, 2048 + 256), (32, 128, 64)]
    assert not spec.uneven_parts(8)
    spec.check(1, deterministic=True)
    with pytest.raises(StartupError, match=r"deterministic-inference: .*--tp-size 2"):
        spec.check(2, deterministic=True)


def test_a_pattern_names_the_blocks_of_nemotron_h(tmp_path: Path) -> None:
    values = {**SIZES, "hybrid_override_pattern": "M-M*-M"}
    spec = read(tmp_path, "NemotronHForCausalLM", values)
    kinds = [type(state) for state in spec.layer_states]
    paged = [RecurrentState, NoState, RecurrentState, PagedState, NoState, RecurrentState]
    assert kinds == paged
    assert spec.canonical("model.layers.0.norm.weight") == "backbone.layers.0.norm.weight"
    assert spec.is_ignored("mtp.layers.0.norm.weight")
    # Two ranks have copies of each of the eight groups, and share its norm.
    assert not spec.uneven_parts(16)
    spec.check(8, deterministic=True)
    with pytest.raises(StartupError, match=r"deterministic-inference: .*--tp-size 16"):
        spec.check(16, deterministic=True)


def test_version_4_stretches_only_layers_without_a_window(tmp_path: Path) -> None:
    """The rotation of OLMo 3 as its published files have it."""
    stretch = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    rope = {"rope_theta": 5e5, "rope_scaling": stretch, "max_position_embeddings": 65_536}
    spec = read(tmp_path, "Olmo3ForCausalLM", {**SIZES, **rope})
    assert isinstance(spec, DecoderSpec)
    assert spec.context_len == 65_536
    layers = [spec.attention(i) for i in range(spec.num_layers)]
    assert [each.window for each in layers] == [4096, 4096, 4096, None, 4096, 4096]
    ropes = [each.rope for each in layers if each.rope is not None]
    assert [rope.scaling for rope in ropes] == ["default"] * 3 + ["yarn"] + ["default"] * 2
    assert {rope.theta for rope in ropes} == {5e5}


def test_every_second_layer_has_a_window(tmp_path: Path) -> None:
    for architecture, window in (("GptOssForCausalLM", 128), ("Gemma2ForCausalLM", 4096)):
        states = read(tmp_path, architecture, SIZES).layer_states
        windows = [state.window for state in states if isinstance(state, PagedState)]
        assert windows == [window, None] * 3


@pytest.mark.parametrize(
    "architecture", ["Ministral3ForCausalLM", "Phi3ForCausalLM", "Starcoder2ForCausalLM"]
)
def test_a_window_is_that_of_every_layer(tmp_path: Path, architecture: str) -> None:
    for window in (512, None):
        states = read(tmp_path, architecture, {**SIZES, "sliding_window": window}).layer_states
        assert [state.window for state in states if isinstance(state, PagedState)] == [window] * 6


def test_a_tensor_of_q_k_and_v_is_not_shared_by_ranks(tmp_path: Path) -> None:
    spec = read(tmp_path, "Phi3ForCausalLM", {**SIZES, "num_key_value_heads": 2})
    assert not spec.uneven_parts(2)
    assert spec.uneven_parts(4) == ["2 key/value heads"]


def test_late_layers_of_gemma_read_the_keys_of_their_kind(tmp_path: Path) -> None:
    """The heads of Gemma 4 as its published files give them."""
    kinds = ["sliding_attention", "full_attention"] * 3
    heads = {"global_head_dim": 256, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    values = {**SIZES, "layer_types": kinds, "num_kv_shared_layers": 3, **heads}
    spec = read(tmp_path, "Gemma4ForCausalLM", {**values, "head_dim": 128})
    assert isinstance(spec, DecoderSpec)
    layers = [spec.attention(i) for i in range(6)]
    assert [each.keys_of for each in layers] == [None, None, None, 1, 2, 1]
    assert [(each.num_kv_heads, each.head_dim) for each in layers] == [(4, 128), (2, 256)] * 3
    assert [each.window for each in layers] == [512, None] * 3
    assert spec.is_ignored("model.layers.3.self_attn.k_norm.weight")
    assert not spec.is_ignored("model.layers.2.self_attn.k_norm.weight")
    named = {weight.name for weight in spec.weights}
    assert "model.layers.2.self_attn.v_proj.weight" in named
    assert "model.layers.1.self_attn.v_proj.weight" not in named
    # A mask in both directions is that of images only.
    images = {**values, "head_dim": 128, "use_bidirectional_attention": "vision"}
    assert read(tmp_path, "Gemma4ForCausalLM", images).weights == spec.weights


def test_layers_of_cohere_without_a_window_do_not_rotate(tmp_path: Path) -> None:
    for window, rotated in ((512, [True, True, True, False, True, True]), (None, [False] * 6)):
        spec = read(tmp_path, "Cohere2ForCausalLM", {**SIZES, "sliding_window": window})
        assert isinstance(spec, DecoderSpec)
        assert [spec.attention(i).rope is not None for i in range(6)] == rotated


def test_layers_after_the_last_are_not_loaded(tmp_path: Path) -> None:
    values = {**SIZES, "num_nextn_predict_layers": 1, "num_mtp_modules": 1}
    for architecture in ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM"):
        spec = read(tmp_path, architecture, values)
        assert spec.is_ignored("model.layers.6.eh_proj.weight")
        assert not spec.is_ignored("model.layers.5.eh_proj.weight")
        assert not spec.is_ignored("model.layers.7.eh_proj.weight")


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("DeepseekV2ForCausalLM", "topk_method", "noaux_tc"),
        ("DeepseekV2ForCausalLM", "norm_topk_prob", True),
        ("DeepseekV2ForCausalLM", "kv_lora_rank", 1024),
        ("DeepseekV3ForCausalLM", "scoring_func", "softmax"),
        ("DeepseekV3ForCausalLM", "moe_layer_freq", 2),
        ("DeepseekV3ForCausalLM", "n_group", 7),
        # Each group needs two experts for its score.
        ("DeepseekV3ForCausalLM", "n_group", 256),
        ("Cohere2ForCausalLM", "hidden_act", "gelu"),
        ("Cohere2ForCausalLM", "sliding_window_pattern", 0),
        ("Gemma2ForCausalLM", "hidden_activation", "gelu"),
        ("Gemma2ForCausalLM", "use_bidirectional_attention", True),
        ("Gemma4ForCausalLM", "hidden_activation", "gelu"),
        ("Gemma4ForCausalLM", "use_bidirectional_attention", "all"),
        ("Gemma4ForCausalLM", "sliding_window", None),
        ("Gemma4ForCausalLM", "num_kv_shared_layers", 6),
        # The only global layer is among those that would read its keys.
        ("Gemma4ForCausalLM", "num_kv_shared_layers", 1),
        ("Gemma4ForCausalLM", "global_head_dim", 33),
        ("Gemma4ForCausalLM", "vocab_size_per_layer_input", 999),
        ("Gemma4ForCausalLM", "num_key_value_heads", 3),
        ("Gemma4ForCausalLM", "per_layer_config", {"0": {"head_dim": 64}}),
        ("Gemma4ForCausalLM", "per_layer_config", {"5": {"sliding_window": 64}}),
        ("Gemma4ForCausalLM", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("Gemma4ForConditionalGeneration", "text_config", None),
        ("Glm4ForCausalLM", "hidden_act", "gelu"),
        ("GlmForCausalLM", "partial_rotary_factor", 0.01),
        ("Glm4MoeForCausalLM", "hidden_act", "gelu"),
        ("Glm4MoeForCausalLM", "partial_rotary_factor", 0.01),
        ("Glm4MoeLiteForCausalLM", "mlp_layer_types", ["sparse"] * 5 + ["dense"]),
        ("GptOssForCausalLM", "swiglu_limit", 6.0),
        ("Gemma3ForCausalLM", "layer_types", [["full_attention"]] * 6),
        ("Lfm2ForCausalLM", "layer_types", [["conv"]] * 6),
        ("GraniteMoeHybridForCausalLM", "layer_types", ["mamba"] * 5),
        ("GraniteMoeHybridForCausalLM", "mamba_d_head", 63),
        ("GraniteMoeHybridForCausalLM", "mamba_n_groups", 3),
        ("GraniteMoeHybridForCausalLM", "position_embedding_type", "alibi"),
        ("GraniteMoeHybridForCausalLM", "time_step_limit", [0.001, 0.1]),
        ("Qwen3NextForCausalLM", "layer_types", [{"linear_attention": 1}] * 6),
        ("Qwen3_5ForCausalLM", "linear_num_value_heads", 24),
        ("NemotronHForCausalLM", "hybrid_override_pattern", "-M*M*M"),
        ("NemotronHForCausalLM", "hybrid_override_pattern", "MEM*EM"),
        ("NemotronHForCausalLM", "layers_block_type", ["moe"] * 6),
        ("MiniMaxM2ForCausalLM", "hidden_act", "gelu"),
        ("MiniMaxM2ForCausalLM", "num_local_experts", 0),
        ("MiniMaxM2ForCausalLM", "qk_norm_type", "per_head"),
        ("MiniMaxM2ForCausalLM", "shared_intermediate_size", 64),
        ("Ministral3ForCausalLM", "hidden_act", "gelu"),
        ("Ministral3ForCausalLM", "rope_parameters", {"llama_4_scaling_beta": 0.1}),
        ("Mistral3ForConditionalGeneration", "text_config", None),
        ("Mistral3ForConditionalGeneration", "text_config", {"model_type": "mistral4"}),
        ("Olmo2ForCausalLM", "hidden_act", "gelu"),
        ("Olmo3ForCausalLM", "hidden_act", "gelu"),
        ("Olmo3ForCausalLM", "sliding_window", None),
        ("Olmo3ForCausalLM", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ("Phi3ForCausalLM", "attention_bias", True),
        ("Phi3ForCausalLM", "hidden_act", "gelu"),
        ("Phi3ForCausalLM", "rope_scaling", {"type": "linear", "factor": 0.5}),
        ("Phi3ForCausalLM", "rope_scaling", {"type": "su", "short_factor": [1.0]}),
        ("SmolLM3ForCausalLM", "use_sliding_window", True),
        ("SmolLM3ForCausalLM", "no_rope_layers", [1, 0]),
        ("Starcoder2ForCausalLM", "hidden_act", "silu"),
        ("Starcoder2ForCausalLM", "num_key_value_heads", 3),
    ],
)
def test_what_cannot_run_is_one_line(
    tmp_path: Path, architecture: str, key: str, value: Any
) -> None:
    with pytest.raises(StartupError) as caught:
        read(tmp_path, architecture, {**SIZES, key: value})
    assert key in caught.value.message
    assert "\n" not in caught.value.message
