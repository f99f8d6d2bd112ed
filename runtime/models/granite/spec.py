"""The `config.json` of Granite 3 and 4: Llama with four scale factors. Front-safe: no torch."""

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
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, read_decoder

TRAITS = DecoderTraits(biases="keyed", has_mlp_bias=True)
DEFAULTS = {"max_position_embeddings": 2048}
_MOST = 1e6


def read(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the `config.json` of a dense Granite; see `read_decoder`."""
    config = Keys(config.source, {**DEFAULTS, **config.values})
    spec = read_decoder(config, generation, TRAITS)
    return replace(
        spec,
        embedding_scale=config.number("embedding_multiplier", 0.0, _MOST, 1.0),
        residual_scale=config.number("residual_multiplier", 0.0, _MOST, 1.0),
        query_scale=config.number("attention_multiplier", 0.0, _MOST, 1.0),
        logit_scale=1.0 / config.number("logits_scaling", 1.0 / _MOST, _MOST, 1.0),
    )


def read_moe(config: Keys, generation: Keys) -> DecoderSpec:
    """Read the `config.json` of a Granite with experts; see `read_decoder`."""
    spec = replace(read(config, generation), mlp_bias=False)
    # A GGUF file stores the gate and up matrices of experts as separate tensors.
    is_gguf = config.mapping("quantization_config").get("quant_method") == "gguf"
    stacked = StackedForm(gate_up="input_linear.weight", down="output_linear.weight")
    num_experts = config.integer("num_local_experts", MAX_EXPERTS, 8)
    experts = ExpertsSpec(
        num_experts=num_experts,
        num_chosen=config.integer("num_experts_per_tok", num_experts, 2),
        intermediate_size=spec.intermediate_size,
        layers=frozenset(range(spec.num_layers)),
        # A softmax over the chosen logits equals the softmax over all logits, scaled to a sum of
        # one.
        router=RouterSpec(sums_to_one=True),
        names=ExpertNames(block="block_sparse_moe", router="router.layer"),
        stacked=None if is_gguf else stacked,
    )
    return replace(spec, experts=experts)
