"""GLM-4's `config.json`. Half of each head is rotated, in neighboring pairs.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import read_partial_rope
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, silu_decoder_fields

TRAITS = DecoderTraits(biases="keyed", head_dim=128)
# Norms of the 0414 checkpoints: one before and one after each half of a layer.
NORMS = {
    "input_norm": "input_layernorm",
    "attention_output_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_mlp_layernorm",
}
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-7,
    "max_position_embeddings": 131_072,
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
}


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the `config.json` of a 0414 checkpoint, `Glm4ForCausalLM`.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    return replace(read_glm(config, generation), norms=NORMS)


def read_glm(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the `config.json` of an earlier GLM-4, `GlmForCausalLM`.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    fields = silu_decoder_fields(config, generation, TRAITS)
    rope, context_len, rotary_dim = read_partial_rope(config, fields["head_dim"], 0.5)
    # Only q, k and v have biases.
    fields["output_bias"] = False
    return DecoderSpec(
        **fields,
        rope=replace(rope, interleaved=True),
        context_len=context_len,
        rotary_dim=rotary_dim,
        fused_gate_up=True,
    )
