"""Qwen3's `config.json`: Llama with norms of query and key heads. Imports no torch."""

from __future__ import annotations

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder

TRAITS = DecoderTraits(
    biases="keyed", qk_norm=True, head_dim=128, window="switched", default_window=4096
)


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings in `config.json` and `generation_config.json`.

    Raises:
        StartupError: a setting is missing, out of range or not supported.
    """
    return read_decoder(config, generation, TRAITS)
