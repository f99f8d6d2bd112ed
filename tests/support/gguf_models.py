"""Writes GGUF files from tiny model folders, with the names and layouts of llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels.quantized_linear.encode import encode
from tests.support.gguf_family_keys import (
    FAMILY_KEYS,
    GEMMA4_WHOLE_NAMES,
    add_extra_layer,
    llama3_factors,
    write_latent_keys,
)
from tests.support.gguf_hybrids import HYBRIDS, put_back, rearranged

Types = Callable[[str], str]

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GEMMA4 = {
    **_GEMMA,
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
}
_GLM4_MOE = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_GRANITE_MOE = {
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_exps",
    "block_sparse_moe.up": "ffn_up_exps",
    "block_sparse_moe.output_linear": "ffn_down_exps",
}
_DEEPSEEK = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
_GLM4 = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "mlp.gate_up_proj": "ffn_up",
}
_MINIMAX_M2 = {
    "block_sparse_moe.gate": "ffn_gate_inp",
}
_PHI3 = {
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_STARCODER2 = {
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_OLMO2 = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT_OSS = {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "mlp.gate": "ffn_gate_exps",
    "mlp.up": "ffn_up_exps",
    "mlp.down": "ffn_down_exps",
}
_LFM2 = {
    "operator_norm": "attn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}
_OWN_NAMES = {
    "deepseek2": _DEEPSEEK,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "gemma4": _GEMMA4,
    "glm4": _GLM4,
    "glm4moe": _GLM4_MOE,
    "gpt-oss": _GPT_OSS,
    "granitehybrid": _GRANITE_MOE,
    "granitemoe": _GRANITE_MOE,
    "lfm2": _LFM2,
    "minimax-m2": _MINIMAX_M2,
    "olmo2": _OLMO2,
    "phi3": _PHI3,
    "starcoder2": _STARCODER2,
}
_ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "Lfm2ForCausalLM": "lfm2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Cohere2ForCausalLM": "cohere2",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "GptOssForCausalLM": "gpt-oss",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeHybridForCausalLM": "granitehybrid",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Ministral3ForCausalLM": "mistral3",
    "NemotronHForCausalLM": "nemotron_h",
    "OlmoeForCausalLM": "olmoe",
    "Phi3ForCausalLM": "phi3",
    "Qwen3NextForCausalLM": "qwen3next",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}
# Architectures for which llama.cpp interleaves the two halves of each head that RoPE rotates.
_OFFSET_NORMS = {"gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe"}
_INTERLEAVED = {"llama", "granite", "granitemoe", "mistral3", "smollm3"}


def write_gguf(
    folder: Path,
    path: Path,
    types: Types = lambda name: "F32",
    extra: dict[str, Any] | None = None,
    *,
    old_latents: bool = False,
    is_old: bool = False,
) -> dict[str, Tensor]:
    """Write the weights of a folder as a GGUF file.

    Args:
        folder: a folder with `config.json` and safetensors.
        path: path of the new file.
        types: returns the type of a matrix for its name in GGUF.
        extra: additional string keys, which replace those from the configuration.
        old_latents: write DeepSeek's key and value projections in the expanded form of old
            converters.
        is_old: write the rows of Qwen3-Next's linear attention as old converters did.

    Returns:
        The float32 values that the file represents, by the names in the folder.
    """
    config = json.loads((folder / "config.json").read_text())
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= load_file(file)
    name = _ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(str(path), name)
    _write_keys(writer, name, config, weights)
    if name == "deepseek2":
        write_latent_keys(writer, config, expanded=old_latents)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    rest = types, name, config
    stands_for: dict[str, Tensor] = {}
    experts: dict[str, dict[int, tuple[str, Tensor]]] = {}
    for full, weight in weights.items():
        if full == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        options = {"old_latents": old_latents, "is_old": is_old}
        written = _write_in_another_layout(writer, full, weight.float(), rest, **options)
        if written is not None:
            stands_for[full] = written
            continue
        found, expert = _name(full, name)
        if expert is not None:
            experts.setdefault(found, {})[expert] = full, weight
            continue
        stands_for[full] = _write(writer, found, weight.float(), *rest)
    for found, stack in experts.items():
        whole = torch.stack([stack[index][1] for index in sorted(stack)]).float()
        values = _write(writer, found, whole, *rest)
        for index, (full, _) in stack.items():
            stands_for[full] = values[index]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stands_for


def _write_in_another_layout(
    writer: gguf.GGUFWriter,
    full: str,
    weight: Tensor,
    rest: tuple[Types, str, dict[str, Any]],
    *,
    old_latents: bool,
    is_old: bool,
) -> Tensor | None:
    """Write a tensor whose numbers the converter moves; return None for any other tensor."""
    _, name, config = rest
    if name in HYBRIDS:
        parts = rearranged(full, weight, name, config, is_old=is_old)
        if parts is not None:
            values = {part: _write(writer, part, each, *rest) for part, each in parts.items()}
            return put_back(full, weight.shape, values, name, config, is_old=is_old)
    if full.endswith("block_sparse_moe.input_linear.weight"):
        # Granite stores gate and up of all experts together; the converter separates them.
        halves = [
            _write(writer, _name(full.replace("input_linear", half), name)[0], values, *rest)
            for half, values in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True)
        ]
        return torch.cat(halves, dim=1)
    if full.endswith("kv_b_proj.weight") and not old_latents:
        return _write_up_projection(writer, full, weight, rest)
    if name == "gpt-oss" and ".experts." in full:
        return _write_gpt_oss_experts(writer, full, weight, rest)
    return None


def _write_up_projection(
    writer: gguf.GGUFWriter, full: str, weight: Tensor, rest: tuple[Types, str, dict[str, Any]]
) -> Tensor:
    """Write DeepSeek's `kv_b_proj` as two stacks: one for keys, transposed, one for values."""
    config = rest[2]
    sizes = config["qk_nope_head_dim"], config["v_head_dim"]
    keys, values = weight.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    names = [_name(full.replace("kv_b", part), "deepseek2")[0] for part in ("k_b", "v_b")]
    keys = _write(writer, names[0], keys.transpose(1, 2).contiguous(), *rest).transpose(1, 2)
    values = _write(writer, names[1], values.contiguous(), *rest)
    return torch.cat([keys, values], dim=1).flatten(0, 1)


def _write_gpt_oss_experts(
    writer: gguf.GGUFWriter, full: str, weight: Tensor, rest: tuple[Types, str, dict[str, Any]]
) -> Tensor:
    """Write a tensor of all experts, transposed, with gate and up separated."""
    prefix, _, part = full.partition(".experts.")
    is_bias = part.endswith("_bias")
    ours = weight if is_bias else weight.transpose(1, 2)
    kind = "bias" if is_bias else "weight"
    parts = {"down": ours}
    if part.startswith("gate_up"):
        parts = {"gate": ours[:, ::2], "up": ours[:, 1::2]}
    values = [
        _write(writer, _name(f"{prefix}.{name}.{kind}", "gpt-oss")[0], each.contiguous(), *rest)
        for name, each in parts.items()
    ]
    found = values[0] if len(values) == 1 else torch.stack(values, dim=2).flatten(1, 2)
    return found if is_bias else found.transpose(1, 2)


def _name(full: str, architecture: str) -> tuple[str, int | None]:
    stem, _, last = full.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{last}", None
    _, _, layer, whole = full.split(".", 3)
    if architecture == "gemma4" and whole in GEMMA4_WHOLE_NAMES:
        return f"blk.{layer}.{GEMMA4_WHOLE_NAMES[whole]}", None
    _, _, layer, rest = stem.split(".", 3)
    if ".experts." in rest:
        _, _, expert, part = rest.split(".")
        kind = {"w1": "gate", "w2": "down", "w3": "up"}.get(part, part.removesuffix("_proj"))
        return f"blk.{layer}.ffn_{kind}_exps.weight", int(expert)
    if last == "sinks":
        return f"blk.{layer}.attn_sinks.weight", None
    if last == "e_score_correction_bias":
        return f"blk.{layer}.exp_probs_b.bias", None
    names = {**_NAMES, **_OWN_NAMES.get(architecture, {})}
    return f"blk.{layer}.{names[rest]}.{last}", None


def _heads(name: str, architecture: str, config: dict[str, Any]) -> int:
    if architecture not in _INTERLEAVED:
        return 0
    if ".attn_q." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".attn_k." in name else 0


def _write(
    writer: gguf.GGUFWriter,
    name: str,
    weight: Tensor,
    types: Types,
    architecture: str,
    config: dict[str, Any],
) -> Tensor:
    """Write one tensor; return the values that it represents, in the folder's layout."""
    heads = _heads(name, architecture, config)
    stored = weight.contiguous()
    if name.endswith("ssm_a"):
        writer.add_tensor(name, -torch.exp(stored).numpy())
        return weight
    if heads:
        stored = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    has_offset = architecture in _OFFSET_NORMS and "ssm_norm" not in name
    offset = 1.0 if has_offset and name.endswith("norm.weight") else 0.0
    is_plain = name.endswith(("bias", "gate_inp_shexp.weight", "ssm_d", "ssm_norm.weight"))
    if stored.dim() == 1 or "_inp." in name or "ssm_conv1d" in name or is_plain:
        if name.endswith("gate_inp_shexp.weight"):
            stored = stored.flatten()
        writer.add_tensor(name, (stored + offset).numpy())
        return (stored + offset - offset).view(weight.shape) if not heads else weight
    if name.endswith("shortconv.conv.weight"):
        # Never quantized; the converter removes the dimension of one input.
        writer.add_tensor(name, stored.squeeze(1).numpy())
        return weight
    kind = types(name)
    if kind in ("F32", "F16"):
        numbers = stored.numpy().astype(np.float32 if kind == "F32" else np.float16)
        writer.add_tensor(name, numbers)
        return weight.half().float() if kind == "F16" else weight
    blocks = encode(stored.flatten(0, -2), kind.lower()).data
    data = blocks.view(*stored.shape[:-1], -1).numpy()
    stored_type = gguf.GGMLQuantizationType[kind]
    writer.add_tensor(name, data, raw_dtype=stored_type)
    # The package `gguf` quantizes, so this does not depend on Headrace's code.
    numbers = torch.from_numpy(gguf.dequantize(data, stored_type).copy()).view(stored.shape)
    if heads:
        numbers = numbers.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
    return numbers


def _write_keys(
    writer: gguf.GGUFWriter, name: str, config: dict[str, Any], weights: dict[str, Tensor]
) -> None:
    # Two architectures have one more layer for predicting further tokens, which is not computed.
    num_layers = len(config.get("layers_block_type") or ()) or config["num_hidden_layers"]
    writer.add_block_count(num_layers + (name in ("glm4moe", "qwen3next")))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    names = "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon"
    layer_norm_eps = next((config[each] for each in names if each in config), None)
    if layer_norm_eps is not None:
        writer.add_layer_norm_eps(layer_norm_eps)
    else:
        eps = config["norm_eps"] if name == "lfm2" else config["rms_norm_eps"]
        writer.add_layer_norm_rms_eps(eps)
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10000.0))))
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if rope.get("beta_fast"):
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config, rope))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if name in _INTERLEAVED:
        writer.add_rope_dimension_count(head_dim)
    if config.get("head_dim") and name not in ("deepseek2", "phi3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    # Version 5 of `transformers` has another name for this in some files.
    experts = config.get("num_experts") or config.get("num_local_experts")
    experts = experts or config.get("n_routed_experts")
    if experts and name != "nemotron_h":
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.get("num_experts_per_tok") or config["top_k_experts"])
        if config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    _write_own_keys(writer, name, config, head_dim)
    assert {"model.embed_tokens.weight", "backbone.embeddings.weight"} & set(weights)


def _write_own_keys(
    writer: gguf.GGUFWriter, name: str, config: dict[str, Any], head_dim: int
) -> None:
    """Write the keys that only one architecture has."""
    if name in ("glm4", "glm4moe"):
        writer.add_rope_dimension_count(head_dim // 2)
    if name == "cohere2":
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_dimension_count(head_dim)
    if name in ("cohere2", "olmo2") and config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
        windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(windowed)
    if name in FAMILY_KEYS:
        FAMILY_KEYS[name](writer, config, head_dim)
    if name == "glm4moe":
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        add_extra_layer(writer, config)
    if name in ("granite", "granitemoe"):
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if name == "gpt-oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if name == "gemma2":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern(
            [kind == "sliding_attention" for kind in config["layer_types"]]
        )
        local = (config.get("rope_parameters") or {}).get("sliding_attention", {})
        writer.add_float32("gemma3.rope.freq_base_swa", float(local.get("rope_theta", 10000.0)))
