"""Gemma 2's `config.json`. Imports no torch.

Attention's scores and the logits are capped. Every second layer has a window.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.config_keys import MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.rope_json import read_rope
from runtime.models.decoder.spec import (
    DecoderSpec,
    DecoderTraits,
    decoder_fields,
    read_layer_types,
)
from runtime.models.gemma3.spec import NORMS

TRAITS = DecoderTraits(biases="keyed", head_dim=256, window="always", default_window=4096)
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_MAX_CAP = 1e6


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the family's `config.json`.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    if config.values.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise config.error("hidden_activation", "'gelu_pytorch_tanh'")
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "false")
    fields = decoder_fields(config, generation, TRAITS)
    layers = read_layer_types(config, fields["num_layers"])
    rope, context_len = read_rope(config)
    scalar = config.number("query_pre_attn_scalar", 1.0, float(MAX_WIDTH), 256.0)
    spec = DecoderSpec(
        **fields,
        rope=rope,
        context_len=context_len,
        zero_centered_norms=True,
        norms=NORMS,
        activation="gelu_tanh",
        embedding_scale=fields["hidden_size"] ** 0.5,
        query_scale=scalar**-0.5,
        score_softcap=_cap(config, "attn_logit_softcapping"),
        logit_softcap=_cap(config, "final_logit_softcapping"),
    )
    if layers is None:
        layers = frozenset(range(0, spec.num_layers, 2))
    return replace(spec, windowed_layers=layers)


def _cap(config: Keys, key: str) -> float:
    """Return the cap under `key`; 0 for null, which means no cap."""
    return 0.0 if config.values.get(key) is None else config.number(key, 1e-3, _MAX_CAP)
