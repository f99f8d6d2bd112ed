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
    "lfm2": _lfm2,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "phi3": _phi3,
}
