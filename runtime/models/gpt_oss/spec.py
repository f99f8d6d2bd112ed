"""The `config.json` of gpt-oss. Imports no torch.

Experts have biases and a clamped gate. Each attention head has a sink. Every second layer has a
window.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.json_file import Keys
from runtime.models.decoder.experts_spec import (
    MAX_EXPERTS,
    ExpertNames,
    ExpertsSpec,
    RouterSpec,
    StackedForm,
)
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder, read_layer_types

TRAITS = DecoderTraits(biases="keyed", head_dim=64, window="always", default_window=128)
# Defaults of `transformers` for absent keys.
DEFAULTS = {
    "num_key_value_heads": 8,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "max_position_embeddings": 131_072,
}
# The rotary settings of files that have neither `rope_parameters` nor `rope_scaling`.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# The only supported values of keys that change results.
_ONLY = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Return the settings in `config.json` and `generation_config.json`.

    Raises:
        StartupError: a setting is missing, out of range or not supported.
    """
    values = {**DEFAULTS, **config.values}
    if not (values.get("rope_parameters") or values.get("rope_scaling")):
        values["rope_scaling"] = _ROPE
    config = Keys(config.source, values)
    for key, only in _ONLY.items():
        if config.number(key, 0.0, 1e6, only) != only:
            raise config.error(key, f"{only}")
    spec = read_decoder(config, generation, TRAITS)
    layers = read_layer_types(config, spec.num_layers)
    # A GGUF file stores the gate and up matrices of experts as separate tensors.
    is_gguf = config.mapping("quantization_config").get("quant_method") == "gguf"
    stacked = StackedForm(is_transposed=True, is_interleaved=True)
    num_experts = config.integer("num_local_experts", MAX_EXPERTS, 128)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_chosen=config.integer("num_experts_per_tok", num_experts, 4),
        intermediate_size=spec.intermediate_size,
        layers=frozenset(range(spec.num_layers)),
        # A softmax over the chosen logits equals the softmax over all logits, scaled to a sum of
        # one.
        router=RouterSpec(sums_to_one=True, has_bias=True),
        has_bias=True,
        gate="swigluoai",
        names=ExpertNames(router="router"),
        stacked=None if is_gguf else stacked,
    )
    return replace(
        spec,
        windowed_layers=frozenset(range(0, spec.num_layers, 2)) if layers is None else layers,
        has_sinks=True,
        experts=experts,
    )
