"""Qwen2-MoE's `config.json`: Qwen2 with experts and a shared expert. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.experts_spec import read_qwen_experts
from runtime.models.decoder.spec import DecoderSpec, read_decoder
from runtime.models.qwen2.spec import TRAITS


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings in `config.json` and `generation_config.json`.

    Raises:
        StartupError: a setting is missing, out of range or not supported.
    """
    has_bias = config.flag("qkv_bias", True)
    traits = TRAITS if has_bias else replace(TRAITS, biases="never")
    spec = read_decoder(config, generation, traits)
    return replace(spec, experts=read_qwen_experts(config, has_shared=True))
