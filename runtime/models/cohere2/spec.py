"""Cohere 2's `config.json`. Imports no torch.

Attention and the MLP of a layer read the same normed input. Only layers with a window rotate
queries and keys.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.spec import (
    DecoderSpec,
    DecoderTraits,
    read_decoder,
    read_window_pattern,
)

TRAITS = DecoderTraits(biases="keyed", window="always", default_window=4096)
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": 255_001,
}
_MAX_SCALE = 1e6


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings in `config.json` and `generation_config.json`.

    Raises:
        StartupError: a setting is missing, out of range or not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    spec = read_decoder(config, generation, TRAITS)
    windowed = read_window_pattern(config, spec.num_layers, 4)
    # `transformers` rotates the heads of a layer if it has a window.
    rotated = frozenset() if spec.sliding_window is None else windowed
    return replace(
        spec,
        rms_norm_eps=config.number("layer_norm_eps", 0.0, 1.0, 1e-5),
        norms={"input_norm": "input_layernorm"},
        has_layer_norms=True,
        is_parallel=True,
        windowed_layers=windowed,
        unrotated_layers=frozenset(range(spec.num_layers)) - rotated,
        rope=replace(spec.rope, interleaved=True),
        logit_scale=config.number("logit_scale", 0.0, _MAX_SCALE, 0.0625),
    )
