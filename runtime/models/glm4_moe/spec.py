"""The `config.json` of GLM-4.5 to 4.7. Imports no torch.

A sigmoid scores the experts. Half of each head is rotated.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import read_partial_rope
from runtime.models.decoder.experts_spec import RouterSpec
from runtime.models.decoder.latent_spec import (
    LatentDecoderSpec,
    read_latent_decoder,
    read_shared_experts,
)
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, silu_decoder_fields

# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}
_LITE = {
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
}
_MAX_EXTRA_LAYERS = 64


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the `config.json` of GLM-4.5, 4.6 or 4.7.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    traits = DecoderTraits(biases="keyed", qk_norm=config.flag("use_qk_norm", False))
    fields = silu_decoder_fields(config, generation, traits)
    rope, context_len, rotary_dim = read_partial_rope(config, fields["head_dim"], 0.5)
    # Only q, k and v have biases.
    fields["output_bias"] = False
    return DecoderSpec(
        **fields,
        rope=rope,
        context_len=context_len,
        rotary_dim=rotary_dim,
        num_extra_layers=config.integer("num_nextn_predict_layers", _MAX_EXTRA_LAYERS, 0, low=0),
        experts=read_shared_experts(config, _router(config), fields["num_layers"]),
    )


def read_lite(config: Keys, generation: Keys) -> LatentDecoderSpec:
    """Read the `config.json` of GLM-4.7-Flash, whose layers keep latents (MLA).

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    spec = read_latent_decoder(config, generation, _LITE)
    config = Keys(config.source, {**_LITE, **config.values})
    kinds = config.values.get("mlp_layer_types")
    if isinstance(kinds, list):
        dense = kinds.count("dense")
        if kinds != ["dense"] * dense + ["sparse"] * (spec.num_layers - dense):
            raise config.error("mlp_layer_types", "dense layers first, then sparse ones")
        config = Keys(config.source, {**config.values, "first_k_dense_replace": dense})
    experts = read_shared_experts(config, _router(config), spec.num_layers)
    return replace(spec, experts=experts)


def _router(config: Keys) -> RouterSpec:
    return RouterSpec(
        score="sigmoid",
        sums_to_one=config.flag("norm_topk_prob", True),
        has_correction=True,
        group_score="best_two",
        is_precise=True,
    )
