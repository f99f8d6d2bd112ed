"""Tiny random models of architectures that Headrace has no family for; see `tiny_models`.

They run by their own code in `transformers`, with Headrace's layers in it. The comments say what is
special about each architecture.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from tests.support.tiny_models import ENDOFTEXT_ID, TinyModel, write_tiny

_WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

ADAPTED_MODELS: dict[str, TinyModel] = {
    "arcee": TinyModel("ArceeForCausalLM"),
    # Keys and values are expanded from a latent vector; values are narrower than keys.
    "deepseek_v3": TinyModel(
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
    ),
    # One norm before attention and MLP, whose outputs are added together. RoPE rotates adjacent
    # dimensions; some layers have no RoPE. The logits are scaled.
    "cohere2": TinyModel(
        "Cohere2ForCausalLM", {**_WINDOWS, "logit_scale": 0.3, "tie_word_embeddings": True}
    ),
    "ernie4_5": TinyModel("Ernie4_5ForCausalLM", {"head_dim": 16, "use_bias": True}),
    "exaone4": TinyModel("Exaone4ForCausalLM", {**_WINDOWS, "sliding_window_pattern": 3}),
    # Attention scores and logits have soft caps; heads are wide.
    "gemma2": TinyModel(
        "Gemma2ForCausalLM",
        {
            **_WINDOWS,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    # RoPE rotates half of each head, in adjacent dimensions.
    "glm": TinyModel("GlmForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "glm4": TinyModel("Glm4ForCausalLM", {"head_dim": 16}),
    # Positions are learned; weight matrices are stored transposed.
    "gpt2": TinyModel("GPT2LMHeadModel", {"tie_word_embeddings": True}),
    # q, k and v are interleaved by head; attention and MLP read the same input.
    "gpt_neox": TinyModel("GPTNeoXForCausalLM"),
    "granite": TinyModel(
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
    ),
    # Experts are chosen in groups, by sigmoids with a correction, beside a shared expert. The first
    # layer has no experts.
    "glm4_moe": TinyModel(
        "Glm4MoeForCausalLM",
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
    # One norm over all heads of q or k together. In OLMo 2 and 3 the norms of a layer follow
    # attention and MLP.
    "minimax_m2": TinyModel(
        "MiniMaxM2ForCausalLM",
        {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
    ),
    "olmo2": TinyModel("Olmo2ForCausalLM"),
    "olmo3": TinyModel("Olmo3ForCausalLM", _WINDOWS),
    "olmoe": TinyModel("OlmoeForCausalLM", {"num_experts": 6, "num_experts_per_tok": 2}),
    "opt": TinyModel("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "phi": TinyModel("PhiForCausalLM", {"num_key_value_heads": 4}),
    # q, k and v are one matrix; RoPE rotates three quarters of each head.
    "phi3": TinyModel(
        "Phi3ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
            }
        },
    ),
    "phi3_window": TinyModel("Phi3ForCausalLM", {"sliding_window": 8}),
    "seed_oss": TinyModel("SeedOssForCausalLM", {"head_dim": 16}),
    # The third layer has no RoPE.
    "smollm3": TinyModel("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 0]}),
    "stablelm": TinyModel("StableLmForCausalLM", {"use_qkv_bias": True}),
    "starcoder2": TinyModel("Starcoder2ForCausalLM", {"sliding_window": 8}),
}

# Architectures for which `transformers` has no tensor-parallel plan.
ONE_RANK = {"gpt2", "opt", "stablelm"}


@cache
def adapted_model(name: str) -> Path:
    """Return the folder of the variant `name`, created on first use; do not write into it."""
    variant = ADAPTED_MODELS[name]
    options = {"pad_token_id": ENDOFTEXT_ID, **variant.options}
    return write_tiny(name, replace(variant, options=options))
