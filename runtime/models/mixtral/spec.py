"""Mixtral's `config.json`: Mistral with experts in place of MLPs. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.experts_spec import MAX_EXPERTS, ExpertNames, ExpertsSpec, RouterSpec
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder

TRAITS = DecoderTraits(window="always")


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings in `config.json` and `generation_config.json`.

    Raises:
        StartupError: a setting is missing, out of range or not supported.
    """
    values = {"sliding_window": None, "rms_norm_eps": 1e-5, **config.values}
    spec = read_decoder(Keys(config.source, values), generation, TRAITS)
    num_experts = config.integer("num_local_experts", MAX_EXPERTS, 8)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_chosen=config.integer("num_experts_per_tok", num_experts, 2),
        intermediate_size=spec.intermediate_size,
        layers=frozenset(range(spec.num_layers)),
        router=RouterSpec(sums_to_one=True),
        names=ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2"),
    )
    return replace(spec, experts=experts)
