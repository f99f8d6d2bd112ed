"""Ministral 3's `config.json`. Imports no torch.

The model is Mistral with queries that are scaled up as their positions grow.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.attention_spec import PositionScale
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import MAX_POSITIONS
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder

TRAITS = DecoderTraits(head_dim=128, window="always")
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The rotary settings of files that have neither `rope_parameters` nor `rope_scaling`.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_MAX_BETA = 1e3


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings in `config.json` and `generation_config.json`.

    Raises:
        StartupError: a setting is missing, out of range or not supported.
    """
    values = {**DEFAULTS, **config.values}
    if not (values.get("rope_parameters") or values.get("rope_scaling")):
        values["rope_parameters"] = _ROPE
    config = Keys(config.source, values)
    spec = read_decoder(config, generation, TRAITS)
    key = "rope_scaling" if config.mapping("rope_scaling") else "rope_parameters"
    rope = Keys(f"{config.source}: {key}", config.mapping(key))
    beta = rope.number("llama_4_scaling_beta", 0.0, _MAX_BETA, 0.0)
    if not beta:
        return spec
    original = rope.integer("original_max_position_embeddings", MAX_POSITIONS)
    return replace(spec, position_scale=PositionScale(beta, original))
