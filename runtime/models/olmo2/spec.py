"""OLMo 2's `config.json`. Imports no torch.

Norms follow attention and the MLP, instead of preceding them. One norm covers all heads of q, and
one all heads of k.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder

TRAITS = DecoderTraits(biases="keyed", qk_norm=True)
NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
# Defaults of `transformers` for absent keys.
DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "eos_token_id": 50_279}


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings in `config.json` and `generation_config.json`.

    Raises:
        StartupError: a setting is missing, out of range or not supported.
    """
    config = Keys(config.source, {**DEFAULTS, **config.values})
    spec = read_decoder(config, generation, TRAITS)
    return replace(spec, norms=NORMS, has_joint_qk_norm=True)
