"""Qwen3-MoE's `config.json`: Qwen3 with experts in place of MLPs. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.experts_spec import read_qwen_experts
from runtime.models.decoder.spec import DecoderSpec, read_decoder
from runtime.models.qwen3 import spec as qwen3

TRAITS = replace(qwen3.TRAITS, head_dim=None)


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings in `config.json` and `generation_config.json`.

    Raises:
        StartupError: a setting is missing, out of range or not supported.
    """
    spec = read_decoder(config, generation, TRAITS)
    return replace(spec, experts=read_qwen_experts(config, has_shared=False))
