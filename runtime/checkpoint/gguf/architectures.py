"""Converts the keys that are special to each GGUF architecture to those of `config.json`. No torch.

To support GGUF, a family needs only a line in `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.checkpoint.config_keys import MAX_HEAD_DIM, MAX_LAYERS, MAX_WIDTH
from runtime.checkpoint.gguf.hybrids import (
    lfm2,
    mamba_keys,
    nemotron_h,
    qwen3_5,
    qwen3_5_moe,
    qwen3_next,
)
from runtime.checkpoint.gguf.own_keys import OwnKeys
from runtime.checkpoint.gguf.qwen_experts import with_experts
from runtime.checkpoint.rope_json import MAX_POSITIONS
from runtime.errors import StartupError

# llama.cpp's numbers for the functions that turn router logits into experts' scores.
_SOFTMAX, _SIGMOID = 1, 2
# Architectures where only a part of each head may rotate.
PARTLY_ROTATED = frozenset({"glm4", "glm4moe", "minimax-m2", "qwen35", "qwen35moe", "qwen3next"})
# Architectures without RoPE. Their files still have a number of rotated elements.
UNROTATED = frozenset({"nemotron_h"})
# Architectures whose layers differ in heads or in the size of the feed-forward block.
VARIED = frozenset({"gemma4", "granitehybrid", "lfm2", "nemotron_h"})
# Architectures with attention over latents (MLA), whose heads are described by other keys.
WITH_LATENTS = frozenset({"deepseek2"})
# The number of groups of experts and how many groups are chosen, by number of experts, for DeepSeek
# V2 and V3. Files of old converters do not have these numbers.
_GROUPS = {160: (8, 3), 256: (8, 4)}


def _llama(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if not keys.values.get("expert_count"):
        return {"architectures": ["LlamaForCausalLM"], "mlp_bias": keys.has("blk.0.ffn_gate.bias")}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": keys.values.get("expert_count"),
        "num_experts_per_tok": keys.values.get("expert_used_count"),
        "intermediate_size": keys.values.get(
            "expert_feed_forward_length", config["intermediate_size"]
        ),
        "sliding_window": None,
    }


def _plain(architecture: str) -> Callable[[OwnKeys, dict[str, Any]], dict[str, Any]]:
    return lambda keys, config: {"architectures": [architecture]}  # noqa: ARG005  # nothing else to say


def _granite(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if not _rotates(keys):
        raise keys.error("rope.scaling.finetuned", "true")
    return {"architectures": ["GraniteForCausalLM"], **_granite_scales(keys, config)}


def _rotates(keys: OwnKeys) -> bool:
    # For Granite, llama.cpp takes this key to say whether heads rotate.
    return keys.flag("rope.scaling.finetuned", True)


def _granite_scales(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # As in llama.cpp, an absent factor or a factor of 0 means the usual value.
    return {
        "mlp_bias": keys.has("blk.0.ffn_gate.bias"),
        "attention_multiplier": keys.values.get("attention.scale") or head_dim**-0.5,
        "embedding_multiplier": keys.values.get("embedding_scale") or 1.0,
        "residual_multiplier": keys.values.get("residual_scale") or 1.0,
        # Despite its name, it is a divisor.
        "logits_scaling": keys.values.get("logit_scale") or 1.0,
    }


def _granitemoe(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.has("blk.0.ffn_gate_shexp.weight"):
        raise StartupError(f"{keys.source}: a shared expert is not supported")
    return {
        **_granite(keys, config),
        "architectures": ["GraniteMoeForCausalLM"],
        "num_local_experts": keys.values.get("expert_count"),
        "num_experts_per_tok": keys.values.get("expert_used_count"),
    }


def _granitehybrid(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    shared = keys.tensors.get("blk.0.ffn_up_shexp.weight", keys.tensors.get("blk.0.ffn_up.weight"))
    return {
        **_granite_scales(keys, config),
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "position_embedding_type": "rope" if _rotates(keys) else "nope",
        "num_local_experts": keys.values.get("expert_count", 0),
        "num_experts_per_tok": keys.values.get("expert_used_count"),
        # Dense models have this size, too; the feed-forward size in the file is unused.
        "shared_intermediate_size": shared.shape[0] if shared is not None else None,
        **mamba_keys(keys, config),
    }


def _olmoe(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001  # as others
    return {
        "architectures": ["OlmoeForCausalLM"],
        "num_experts": keys.values.get("expert_count"),
        "num_experts_per_tok": keys.values.get("expert_used_count"),
        "norm_topk_prob": False,
    }


def _shared_experts(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` keys of experts that DeepSeek and GLM have in common."""
    # The file's number of layers includes those that predict further tokens (MTP).
    num_extra = keys.integer("nextn_predict_layers", MAX_LAYERS, 0, low=0)
    return {
        "num_hidden_layers": config["num_hidden_layers"] - num_extra,
        "num_nextn_predict_layers": num_extra,
        "n_routed_experts": keys.values.get("expert_count"),
        "n_shared_experts": keys.values.get("expert_shared_count"),
        "num_experts_per_tok": keys.values.get("expert_used_count"),
        "moe_intermediate_size": keys.values.get("expert_feed_forward_length"),
        "first_k_dense_replace": keys.values.get("leading_dense_block_count"),
        "n_group": keys.values.get("expert_group_count"),
        "topk_group": keys.values.get("expert_group_used_count"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.values.get("expert_weights_scale") or 1.0,
    }


def _glm4moe(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.values.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise keys.error("expert_gating_func", f"{_SIGMOID} (sigmoids)")
    return {
        **_shared_experts(keys, config),
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": keys.integer("attention.key_length", MAX_HEAD_DIM),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }


def _deepseek2(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.values.get("attention.temperature_scale"):
        raise keys.error("attention.temperature_scale", "absent: it is not supported")
    num_experts = keys.integer("expert_count", MAX_WIDTH)
    num_groups, num_chosen = _GROUPS.get(num_experts, (1, 1))
    num_groups = keys.integer("expert_group_count", num_experts, num_groups)
    found = _shared_experts(keys, config)
    found["n_group"] = num_groups
    found["topk_group"] = keys.integer(
        "expert_group_used_count", num_groups, min(num_chosen, num_groups)
    )
    # Old files of DeepSeek V2 do not name the scoring function.
    scoring = keys.values.get("expert_gating_func") or _SOFTMAX
    if scoring not in (_SOFTMAX, _SIGMOID):
        raise keys.error("expert_gating_func", f"{_SOFTMAX} (a softmax) or {_SIGMOID} (sigmoids)")
    if scoring == _SIGMOID:
        found["architectures"] = ["DeepseekV3ForCausalLM"]
    else:
        found["architectures"] = ["DeepseekV2ForCausalLM"]
        found["topk_method"] = "group_limited_greedy" if num_groups > 1 else "greedy"
    # Files for the absorbed form have the head sizes of the plain form under keys with this suffix.
    end = "_mla" if "attention.key_length_mla" in keys.values else ""
    rope_dim = keys.integer("rope.dimension_count", MAX_HEAD_DIM)
    key_dim = keys.integer(f"attention.key_length{end}", MAX_HEAD_DIM, low=rope_dim + 1)
    has_query_rank = keys.has("blk.0.attn_q_a.weight")
    found |= {
        "q_lora_rank": keys.values.get("attention.q_lora_rank") if has_query_rank else None,
        "kv_lora_rank": keys.values.get("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": keys.values.get(f"attention.value_length{end}"),
        "has_split_kv_b_proj": not keys.has("blk.0.attn_kv_b.weight"),
    }
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0, 1e6, 0.0)
    if multiplier and config.get("rope_scaling"):
        # The file has no `mscale`. As in llama.cpp, it equals `mscale_all_dim`, which the converter
        # has multiplied by 0.1 in float32.
        mscale = round(10.0 * multiplier, 6)
        both = {"mscale": mscale, "mscale_all_dim": mscale}
        found["rope_scaling"] = {**config["rope_scaling"], **both}
    return found


def _glm4(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.values.get("rope.dimension_sections"):
        raise keys.error("rope.dimension_sections", "absent: images are not supported")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    head_dim = keys.integer("attention.key_length", MAX_HEAD_DIM, head_dim)
    rope_dim = keys.integer("rope.dimension_count", head_dim)
    return {
        "architectures": ["Glm4ForCausalLM"],
        "head_dim": head_dim,
        "partial_rotary_factor": rope_dim / head_dim,
    }


def _olmo2(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    window = keys.values.get("attention.sliding_window")
    if not window:
        return {"architectures": ["Olmo2ForCausalLM"]}
    if keys.values.get("rope.freq_base_swa", config["rope_theta"]) != config["rope_theta"]:
        raise keys.error("rope.freq_base_swa", f"{config['rope_theta']}, as rope.freq_base")
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        **_window_pattern(keys),
    }


def _cohere2(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Cohere2ForCausalLM"],
        "layer_norm_eps": config["rms_norm_eps"],
        "sliding_window": keys.values.get("attention.sliding_window"),
        "logit_scale": keys.number("logit_scale", 0.0, 1e6),
        **_window_pattern(keys),
    }


def _gpt_oss(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    # As in llama.cpp, every second layer has a window unless the file lists the layers.
    found: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": keys.values.get(
            "expert_feed_forward_length", config["intermediate_size"]
        ),
        "num_local_experts": keys.values.get("expert_count"),
        "num_experts_per_tok": keys.values.get("expert_used_count"),
        "sliding_window": keys.values.get("attention.sliding_window"),
        **_window_pattern(keys),
    }
    # `truncate` is set here because the files have no key for it: this family does not round the
    # bounds of the stretched frequencies. And without any scaling in the file, `rope_scaling` must
    # say so, because the family's default is the scaling of the released models.
    scaling = config.get("rope_scaling", {"rope_type": "default"})
    found["rope_scaling"] = {**scaling, "truncate": False}
    return found


def _phi3(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    original = keys.integer(
        "rope.scaling.original_context_length", MAX_POSITIONS, config["max_position_embeddings"]
    )
    return {
        "architectures": ["Phi3ForCausalLM"],
        "head_dim": head_dim,
        "partial_rotary_factor": keys.integer("rope.dimension_count", head_dim, head_dim)
        / head_dim,
        "original_max_position_embeddings": original,
        # 0 for none.
        "sliding_window": keys.values.get("attention.sliding_window") or None,
    }


def _starcoder2(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    # The files have no key for the window, because llama.cpp has no window for this family.
    return {
        "architectures": ["Starcoder2ForCausalLM"],
        "norm_epsilon": config["rms_norm_eps"],
        "use_bias": keys.has("blk.0.attn_q.bias"),
        "sliding_window": None,
    }


def _minimax_m2(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.values.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise keys.error("expert_gating_func", f"{_SIGMOID} (sigmoids)")
    return {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "intermediate_size": keys.values.get(
            "expert_feed_forward_length", config["intermediate_size"]
        ),
        "num_local_experts": keys.values.get("expert_count"),
        "num_experts_per_tok": keys.values.get("expert_used_count"),
    }


def _mistral3(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.values.get("expert_count"):
        raise keys.error("expert_count", "absent: experts are not supported")
    # Without a key, the family would assume the scaling of the released models.
    scaling = {"rope_type": "default", **config.get("rope_scaling", {})}
    if scaling["rope_type"] == "yarn":
        scaling |= {
            "mscale": 1.0,
            "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier", 0.0, 1e6, 0.0),
            "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.0, 1e3, 0.0),
        }
    return {
        "architectures": ["Ministral3ForCausalLM"],
        "rope_scaling": scaling,
        "sliding_window": None,
    }


def _smollm3(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001  # as others
    # The files do not say which layers have no positions; as in llama.cpp, every fourth has none.
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "mlp_bias": keys.has("blk.0.ffn_gate.bias"),
        "no_rope_layer_interval": 4,
    }


def _gemma(keys: OwnKeys, config: dict[str, Any], num_layers_of_largest: int) -> dict[str, Any]:
    """Return the `config.json` keys that Gemma 2 and Gemma 3 have in common.

    Args:
        keys: the file's keys.
        config: the keys of `config.json` so far.
        num_layers_of_largest: number of layers of the largest model of the generation.
    """
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    # As in llama.cpp, the scale follows from the head size, except in the largest model.
    is_largest = layers == num_layers_of_largest
    scalar = hidden // config["num_attention_heads"] if is_largest else config.get("head_dim", 256)
    found: dict[str, Any] = {"query_pre_attn_scalar": scalar}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.values.get(name):
            found[name] = keys.values[name]
    if keys.values.get("attention.sliding_window"):
        found["sliding_window"] = keys.values["attention.sliding_window"]
    return found


def _gemma2(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Gemma2ForCausalLM"], **_gemma(keys, config, 46)}


def _gemma3(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 1.0, 1e12, 10000.0),
        "rope_theta": keys.number("rope.freq_base", 1.0, 1e12, 1e6),
        **_gemma(keys, config, 62),
    }
    return found | _window_pattern(keys)


def _gemma4(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    num_layers = config["num_hidden_layers"]
    pattern = keys.values.get("attention.sliding_window_pattern")
    # One value if all layers are of one kind.
    pattern = [bool(pattern)] * num_layers if not isinstance(pattern, list) else pattern
    if len(pattern) != num_layers:
        raise keys.error("attention.sliding_window_pattern", f"one for each of {num_layers} layers")
    pattern[-1] = False
    windowed = next((i for i in range(num_layers) if pattern[i]), 0)
    whole = next(i for i in range(num_layers) if not pattern[i])
    heads = keys.of_layers("attention.head_count_kv", num_layers)
    sizes = keys.of_layers("feed_forward_length", num_layers)
    readers = keys.integer("attention.shared_kv_layers", num_layers, 0, low=0)
    is_wide = sizes[-1] != sizes[0]
    wide = [
        sizes[0] * (2 if is_wide and i >= num_layers - readers else 1) for i in range(num_layers)
    ]
    if sizes != wide or heads != [heads[windowed if each else whole] for each in pattern]:
        raise keys.error(
            "feed_forward_length", "as the kinds of layers have it, like head_count_kv"
        )
    of_whole = {"head_dim": config["head_dim"], "num_key_value_heads": heads[whole]}
    inputs = keys.tensors.get("per_layer_token_embd.weight")
    found: dict[str, Any] = {
        "architectures": ["Gemma4ForCausalLM"],
        "layer_types": ["sliding_attention" if each else "full_attention" for each in pattern],
        "sliding_window": keys.values.get("attention.sliding_window"),
        "head_dim": keys.integer("attention.key_length_swa", MAX_HEAD_DIM, config["head_dim"]),
        "num_key_value_heads": heads[windowed],
        "per_layer_config": {str(i): of_whole for i in range(num_layers) if not pattern[i]},
        "attention_k_eq_v": not keys.has(f"blk.{whole}.attn_v.weight"),
        "num_kv_shared_layers": readers,
        "use_double_wide_mlp": is_wide,
        "hidden_size_per_layer_input": keys.values.get("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": config["vocab_size"] if inputs is None else inputs.shape[0],
        "final_logit_softcapping": keys.values.get("final_logit_softcapping"),
        "rope_scaling": None,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": keys.values.get("rope.freq_base_swa", 10000.0)},
            "full_attention": {
                **config.get("rope_scaling", {}),
                "rope_theta": keys.values.get("rope.freq_base", 1e6),
            },
        },
    }
    if keys.values.get("expert_count"):
        found |= {
            "enable_moe_block": True,
            "num_experts": keys.values["expert_count"],
            "top_k_experts": keys.values.get("expert_used_count"),
            "moe_intermediate_size": keys.values.get("expert_feed_forward_length"),
        }
    return found


def _window_pattern(keys: OwnKeys) -> dict[str, Any]:
    """Return the `config.json` keys that say which layers have a window; empty if unknown."""
    pattern = keys.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return {
            "layer_types": [
                "sliding_attention" if windowed else "full_attention" for windowed in pattern
            ]
        }
    if pattern is not None and not isinstance(pattern, bool):
        return {"sliding_window_pattern": pattern}
    return {}


# The conversion of each architecture, by llama.cpp's name. Mistral models are "llama" there, and
# Mixtral models are "llama" with experts.
ARCHITECTURES: dict[str, Callable[[OwnKeys, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _plain("Qwen2ForCausalLM"),
    "qwen3": _plain("Qwen3ForCausalLM"),
    "qwen2moe": with_experts("Qwen2MoeForCausalLM", sums_to_one=False),
    "qwen3moe": with_experts("Qwen3MoeForCausalLM", sums_to_one=True),
    "cohere2": _cohere2,
    "deepseek2": _deepseek2,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm4": _glm4,
    "glm4moe": _glm4moe,
    "gpt-oss": _gpt_oss,
    "lfm2": lfm2,
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "phi3": _phi3,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "granitehybrid": _granitehybrid,
    "nemotron_h": nemotron_h,
    "olmo2": _olmo2,
    "olmoe": _olmoe,
    "qwen35": qwen3_5,
    "qwen35moe": qwen3_5_moe,
    "qwen3next": qwen3_next,
    "smollm3": _smollm3,
    "starcoder2": _starcoder2,
}
