"""The `config.json` of Phi-3 and Phi-4. Imports no torch.

Checkpoints store q, k and v as one tensor. The long-context models use LongRoPE.
"""

from __future__ import annotations

import math
from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import MAX_POSITIONS, RopeConfig, read_partial_rope
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, silu_decoder_fields

TRAITS = DecoderTraits(window="always")
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "sliding_window": None,
    "bos_token_id": 1,
    "eos_token_id": 32_000,
}
# Names of LongRoPE in `config.json`; `su` and `yarn` are from older files.
_LONG = ("longrope", "su", "yarn")
_MAX_FACTOR = 2.0**20


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the family's `config.json`.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        if config.flag(key, False):
            raise config.error(key, "false")
    fields = silu_decoder_fields(config, generation, TRAITS)
    key = "rope_scaling" if config.mapping("rope_scaling") else "rope_parameters"
    numbers = config.mapping(key)
    kind = numbers.get("rope_type") or numbers.get("type")
    # The base and the rotated share of a head are read in the same way with and without LongRoPE.
    plain = {**numbers, "rope_type": "default"} if kind in _LONG else numbers
    of_plain = Keys(config.source, {**config.values, key: plain})
    rope, context_len, rotary_dim = read_partial_rope(of_plain, fields["head_dim"], 1.0)
    if kind in _LONG:
        rope = _long_rope(config, Keys(f"{config.source}: {key}", numbers), rope, rotary_dim // 2)
    return DecoderSpec(
        **fields,
        rope=rope,
        context_len=context_len,
        rotary_dim=rotary_dim,
        fused_qkv=True,
        fused_gate_up=True,
    )


def _long_rope(config: Keys, numbers: Keys, rope: RopeConfig, num_angles: int) -> RopeConfig:
    factors: dict[str, list[float]] = {}
    for key in ("short_factor", "long_factor"):
        found = numbers.values.get(key)
        if not isinstance(found, list) or len(found) != num_angles:
            raise numbers.error(key, f"{num_angles} numbers")
        if not all(type(one) in (int, float) and one > 0 for one in found):
            raise numbers.error(key, "positive numbers")
        factors[key] = [float(one) for one in found]
    original = config.integer("original_max_position_embeddings", MAX_POSITIONS, low=2)
    longest = config.integer("max_position_embeddings", MAX_POSITIONS)
    factor = numbers.number("factor", 0.0, _MAX_FACTOR, longest / original)
    growth = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    parameters = {
        **factors,
        "original_max_position_embeddings": original,
        "attention_factor": numbers.number("attention_factor", 0.0, _MAX_FACTOR, growth),
    }
    return replace(rope, scaling="longrope", parameters=parameters)
