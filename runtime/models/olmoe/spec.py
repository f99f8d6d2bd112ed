"""OLMoE's `config.json`: experts, and one norm over all heads of q and of k. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.experts_spec import read_qwen_experts
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder

TRAITS = DecoderTraits(biases="keyed", qk_norm=True)
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "vocab_size": 50_304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "eos_token_id": 50_279,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings in the family's `config.json`.

    Raises:
        StartupError: a number is missing or out of range, or q, k and v are clipped, which no
            released model does.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    if config.values.get("clip_qkv") is not None:
        raise config.error("clip_qkv", "null")
    spec = read_decoder(config, generation, TRAITS)
    keys = {**config.values, "moe_intermediate_size": spec.intermediate_size}
    experts = read_qwen_experts(Keys(config.source, keys), has_shared=False)
    return replace(spec, has_joint_qk_norm=True, experts=experts)
