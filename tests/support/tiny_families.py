"""Tiny random models of the families that `tests/numerics/test_families.py` compares.

A family whose layers differ from others only in numbers is in `tiny_models`, whose variants go
through more tests. The comments say what is special about each family.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from tests.support.adapted_models import ADAPTED_MODELS
from tests.support.tiny_models import ENDOFTEXT_ID, TinyModel, write_tiny

_WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

# RoPE rotates adjacent dimensions and is stretched (YaRN), which also scales the attention scores.
_DEEP_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.5,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "rope_parameters": _DEEP_YARN,
}

_MINISTRAL3 = {
    "head_dim": 32,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    },
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
# Two kinds of layers, whose heads differ in number and size. In global layers, RoPE rotates a
# quarter of each head.
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}

TINY_FAMILIES: dict[str, TinyModel] = {
    # The KV cache has latents. Heads of queries, keys and values differ in size; queries have no
    # latent. Experts are chosen in groups by a softmax.
    "deepseek_v2": TinyModel(
        "DeepseekV2ForCausalLM",
        {
            **_LATENTS,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
    # Queries have a latent. Experts are chosen in groups by sigmoids with a correction.
    "deepseek_v3": TinyModel(
        "DeepseekV3ForCausalLM",
        {**_LATENTS, "q_lora_rank": 24, "n_group": 2, "topk_group": 1, "num_mtp_layers": 0},
    ),
    # Keys and values of the expanded latents have equal sizes; one layer has no experts.
    "glm4_moe_lite": TinyModel(
        "Glm4MoeLiteForCausalLM",
        {
            **_LATENTS,
            "q_lora_rank": 24,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    # The last three layers read keys of earlier layers. Each layer has token embeddings of its own.
    "gemma4_inputs": TinyModel(
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 512,
        },
    ),
    # In global layers the keys are also the values. Experts are beside the dense MLP. The towers of
    # images and audio are not loaded.
    "gemma4_moe": TinyModel(
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {
                **_GEMMA4,
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 2,
                "moe_intermediate_size": 32,
                "tie_word_embeddings": False,
                "pad_token_id": ENDOFTEXT_ID,
            },
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "position_embedding_size": 64,
            },
            "tie_word_embeddings": False,
        },
    ),
    # RoPE rotates half of each head, after the head's norm; q, k and v have biases.
    "glm4_moe_normed": TinyModel(
        "Glm4MoeForCausalLM",
        {
            "head_dim": 16,
            "use_qk_norm": True,
            "attention_bias": True,
            "moe_intermediate_size": 32,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 2,
        },
    ),
    # Gate and up of all experts are one matrix.
    "granite_moe": TinyModel(
        "GraniteMoeForCausalLM",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    # One norm over all heads of q or k together; RoPE is stretched only in layers without a window.
    "olmo3_yarn": TinyModel(
        "Olmo3ForCausalLM",
        {
            **_WINDOWS,
            "head_dim": 32,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 20000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    # There is one key head, which both ranks of a pair keep.
    "olmo2_shared_keys": TinyModel("Olmo2ForCausalLM", {"num_key_value_heads": 1}),
    # Each RoPE frequency has a factor of its own; those for the original context apply here. RoPE
    # rotates half of each head.
    "phi3_short": TinyModel(
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 256,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5, 2.0, 4.0],
                "long_factor": [1.0, 3.0, 9.0, 27.0],
                "attention_factor": 1.25,
            },
        },
    ),
    # Queries are scaled up from the sixteenth position on; RoPE is stretched.
    "ministral3": TinyModel("Ministral3ForCausalLM", _MINISTRAL3),
    # The text model of Ministral 3 beside an image tower, then that of Mistral, whose output head
    # is not tied.
    "mistral3": TinyModel(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {
                **_MINISTRAL3,
                "model_type": "ministral3",
                "pad_token_id": ENDOFTEXT_ID,
            },
            "vision_config": _PIXTRAL,
            "tie_word_embeddings": True,
        },
    ),
    "mistral3_small": TinyModel(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {
                "model_type": "mistral",
                "head_dim": 32,
                "sliding_window": None,
                "pad_token_id": ENDOFTEXT_ID,
            },
            "vision_config": _PIXTRAL,
            "tie_word_embeddings": False,
        },
    ),
    # Attention sinks, windows, biases of experts, a clamped gate, and one tensor for all experts.
    "gpt_oss": TinyModel(
        "GptOssForCausalLM",
        {**_WINDOWS, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
}

# This variant has no window, because an engine that frees pages behind a window retracts nothing.
TINY_FAMILIES["starcoder2_tied"] = TinyModel("Starcoder2ForCausalLM", {"tie_word_embeddings": True})

# These are also tested with their own code in `transformers`, in `test_adapted_models`.
TINY_FAMILIES |= {
    name: ADAPTED_MODELS[name]
    for name in (
        "cohere2",
        "gemma2",
        "glm",
        "glm4",
        "granite",
        "minimax_m2",
        "olmo2",
        "olmoe",
        "phi3",
        "smollm3",
    )
}


@cache
def tiny_family(name: str) -> Path:
    """Return the folder of the variant `name`, made on first use; do not write into it."""
    variant = TINY_FAMILIES[name]
    options = dict(variant.options)
    if "text_config" not in options:
        options.setdefault("pad_token_id", ENDOFTEXT_ID)
    return write_tiny(name, replace(variant, options=options))
