"""The example family of docs/how-to/add-a-model-family.md: a Llama with other names for norms."""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder

NORMS = {"input_norm": "ln_attention", "mlp_norm": "ln_mlp"}
TRAITS = DecoderTraits(biases="keyed", has_mlp_bias=True)


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the spec from the family's `config.json`; see `read_decoder`."""
    return replace(read_decoder(config, generation, TRAITS), norms=NORMS)
