"""Starcoder 2's `config.json`: LayerNorms, biases, and an MLP without a gate.

Imports no torch.
"""

from __future__ import annotations

from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import read_rope
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, UngatedMLP, decoder_fields

TRAITS = DecoderTraits(window="always")
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "bos_token_id": 50_256,
    "eos_token_id": 50_256,
}


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the family's `config.json`.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    for key, only in (("hidden_act", "gelu_pytorch_tanh"), ("mlp_type", "default")):
        if config.values.get(key, only) != only:
            raise config.error(key, repr(only))
    fields = decoder_fields(config, generation, TRAITS)
    for key in ("attention_bias", "output_bias", "mlp_bias"):
        fields[key] = config.flag("use_bias", True)
    fields["rms_norm_eps"] = config.number("norm_epsilon", 0.0, 1.0, 1e-5)
    rope, context_len = read_rope(config)
    return DecoderSpec(
        **fields,
        rope=rope,
        context_len=context_len,
        has_layer_norms=True,
        has_norm_biases=True,
        ungated_mlp=UngatedMLP("gelu_tanh", up="c_fc", down="c_proj"),
    )
