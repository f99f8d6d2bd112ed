"""The `config.json` of DeepSeek V2, V3 and R1 and of Kimi K2. Imports no torch.

These models have attention over latents (MLA) and many small experts.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.experts_spec import RouterSpec
from runtime.models.decoder.latent_spec import (
    LatentDecoderSpec,
    read_latent_decoder,
    read_shared_experts,
)

# Defaults of `transformers` for absent keys.
_V2 = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "max_position_embeddings": 2048,
}
_V3 = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 4096,
}


def read_v2(config: Keys, generation: Keys) -> LatentDecoderSpec:
    """Read the `config.json` of DeepSeek V2.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    spec = read_latent_decoder(config, generation, _V2)
    config = Keys(config.source, {**_V2, **config.values})
    method = config.values.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error("topk_method", "greedy or group_limited_greedy")
    if config.flag("norm_topk_prob", False):
        raise config.error("norm_topk_prob", "false in this family")
    if method == "greedy":
        config = Keys(config.source, {**config.values, "n_group": None})
    router = RouterSpec(is_precise=True)
    # DeepSeek V2 rotates neighboring elements, as real and imaginary parts of complex numbers.
    rope = replace(spec.rope, interleaved=True)
    return replace(spec, rope=rope, experts=read_shared_experts(config, router, spec.num_layers))


def read_v3(config: Keys, generation: Keys) -> LatentDecoderSpec:
    """Read the `config.json` of DeepSeek V3 and R1, and of Kimi K2, which has the same keys.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    spec = read_latent_decoder(config, generation, _V3)
    config = Keys(config.source, {**_V3, **config.values})
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.values.get(key, only) != only:
            raise config.error(key, only)
    router = RouterSpec(
        score="sigmoid",
        sums_to_one=config.flag("norm_topk_prob", True),
        has_correction=True,
        group_score="best_two",
        is_precise=True,
    )
    return replace(spec, experts=read_shared_experts(config, router, spec.num_layers))
