"""Writes the keys of GGUF files that only one architecture has, as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np


def _gemma4(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    num_layers, readers = len(windowed), config["num_kv_shared_layers"]
    of_global = next(iter(config["per_layer_config"].values()))
    writer.add_shared_kv_layers(readers)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_key_length(of_global["head_dim"])
    writer.add_value_length(of_global["head_dim"])
    writer.add_key_length_swa(head_dim)
    writer.add_value_length_swa(head_dim)
    writer.add_rope_dimension_count(of_global["head_dim"])
    writer.add_rope_dimension_count_swa(head_dim)
    size = config["intermediate_size"]
    late = range(num_layers - readers, num_layers)
    writer.add_feed_forward_length([size * (2 if i in late else 1) for i in range(num_layers)])
    heads = config["num_key_value_heads"], of_global["num_key_value_heads"]
    writer.add_head_count_kv([heads[0] if each else heads[1] for each in windowed])
    ropes = config["rope_parameters"]
    writer.add_float32("gemma4.rope.freq_base_swa", ropes["sliding_attention"]["rope_theta"])
    share = ropes["full_attention"]["partial_rotary_factor"]
    num_angles = int(of_global["head_dim"] * share / 2)
    rest = of_global["head_dim"] // 2 - num_angles
    factors = np.array([1.0] * num_angles + [1e30] * rest, dtype=np.float32)
    writer.add_tensor("rope_freqs.weight", factors)


# Names of Gemma 4's tensors in a layer that do not end as the checkpoint's do.
GEMMA4_WHOLE_NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
}


def _lfm2(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    kinds, heads = config["layer_types"], config["num_key_value_heads"]
    writer.add_head_count_kv([heads if each == "full_attention" else 0 for each in kinds])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    # As the model computes it, rounded up to a multiple.
    multiple, size = config["block_multiple_of"], int(2 * config["intermediate_size"] / 3)
    writer.add_feed_forward_length(-(-size // multiple) * multiple)


def _delta_net(
    writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int, num_extra: int
) -> None:
    kinds, heads = config["layer_types"], config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    # The package has no function for this key yet. It includes layers for further tokens.
    recurrent = [each == "linear_attention" for each in kinds] + [False] * num_extra
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    writer.add_full_attention_interval(config.get("full_attention_interval", 4))
    writer.add_rope_dimension_count(
        int(head_dim * config["rope_parameters"]["partial_rotary_factor"])
    )


def add_extra_layer(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write two tensors of a layer that predicts further tokens, and the number of such layers."""
    writer.add_nextn_predict_layers(1)
    for extra, shape in (("nextn.eh_proj", (8, 16)), ("ffn_up_exps", (2, 8, 8))):
        weight = np.zeros(shape, dtype=np.float32)
        writer.add_tensor(f"blk.{config['num_hidden_layers']}.{extra}.weight", weight)


def _qwen3_next(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    _delta_net(writer, config, head_dim, 1)
    add_extra_layer(writer, config)


def _qwen3_5(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    _delta_net(writer, config, head_dim, 0)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _granite_hybrid(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    heads, inner = config["mamba_n_heads"], config["mamba_expand"] * config["hidden_size"]
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    writer.add_head_count_kv(
        [
            config["num_key_value_heads"] if each == "full_attention" else 0
            for each in config["layer_types"]
        ]
    )
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_scaling_finetuned(config.get("position_embedding_type") == "rope")
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def _nemotron_h(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    kinds = config["layers_block_type"]
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    heads, size = config["num_key_value_heads"], config["intermediate_size"]
    writer.add_head_count_kv([heads if each == "full_attention" else 0 for each in kinds])
    writer.add_feed_forward_length([size if each == "mlp" else 0 for each in kinds])
    # The converter writes this number although nothing rotates. It may differ from a head's size.
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])


def _minimax_m2(
    writer: gguf.GGUFWriter,
    config: dict[str, Any],
    head_dim: int,
) -> None:
    writer.add_rope_dimension_count(config["rotary_dim"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _mistral3(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _phi3(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)


# By architecture: functions that take the writer, the configuration and the size of a head.
FAMILY_KEYS: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any], int], None]] = {
    "gemma4": _gemma4,
    "granitehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "nemotron_h": _nemotron_h,
    "phi3": _phi3,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5,
    "qwen3next": _qwen3_next,
}


def llama3_factors(config: dict[str, Any], rope: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Compute the RoPE factors of Llama 3 as llama.cpp's converter does."""
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / (rope["rope_theta"] ** (np.arange(0, size, 2) / size))
    low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
    high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
    factors = []
    for frequency in frequencies:
        wave = 2 * np.pi / frequency
        if wave < high:
            factors.append(1.0)
        elif wave > low:
            factors.append(rope["factor"])
        else:
            smooth = rope["original_max_position_embeddings"] / wave - rope["low_freq_factor"]
            smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def write_latent_keys(writer: gguf.GGUFWriter, config: dict[str, Any], *, expanded: bool) -> None:
    """Write DeepSeek's keys, for the expanded form of attention or for the absorbed one."""
    rope_dim, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    key, value = config["qk_nope_head_dim"] + rope_dim, config["v_head_dim"]
    if expanded:
        writer.add_key_length(key)
        writer.add_value_length(value)
    else:
        writer.add_key_length(latent + rope_dim)
        writer.add_value_length(latent)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_rope_dimension_count(rope_dim)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if config["architectures"] == ["DeepseekV3ForCausalLM"]:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    mscale = config["rope_parameters"].get("mscale_all_dim")
    if mscale is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * mscale)
