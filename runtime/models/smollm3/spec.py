"""SmolLM3's `config.json`: Llama without rotation in every fourth layer. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.config_keys import MAX_LAYERS
from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder

TRAITS = DecoderTraits(biases="keyed", has_mlp_bias=True)
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rope_theta": 2_000_000.0,
    "tie_word_embeddings": True,
}


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings in `config.json` and `generation_config.json`.

    Raises:
        StartupError: a setting is missing, out of range or not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    if config.flag("use_sliding_window", False):
        raise config.error("use_sliding_window", "false")
    spec = read_decoder(config, generation, TRAITS)
    rotates = config.values.get("no_rope_layers")
    if rotates is None:
        interval = config.integer("no_rope_layer_interval", MAX_LAYERS, 4)
        rotates = [int((i + 1) % interval != 0) for i in range(spec.num_layers)]
    # In `no_rope_layers`, 1 means that the layer does rotate.
    if not isinstance(rotates, list) or len(rotates) != spec.num_layers:
        raise config.error("no_rope_layers", f"{spec.num_layers} entries, each 0 or 1")
    return replace(spec, unrotated_layers=frozenset(i for i, one in enumerate(rotates) if not one))
