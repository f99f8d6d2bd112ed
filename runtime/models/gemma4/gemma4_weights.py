"""The weight map of Gemma 4: the parameter for each checkpoint tensor. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.checkpoint.model_spec import WeightSpec
from runtime.models.decoder.experts_spec import ExpertsSpec
from runtime.models.decoder.weight_map import linear_weights, norm_weight

if TYPE_CHECKING:
    from runtime.models.gemma4.spec import Gemma4Spec

# Maps our names for the norms of dense block and experts to the names in checkpoints.
EXPERT_NORMS = {
    "dense_norm": "post_feedforward_layernorm_1",
    "expert_norm": "pre_feedforward_layernorm_2",
    "expert_output_norm": "post_feedforward_layernorm_2",
}


@dataclass(frozen=True, kw_only=True)
class Gemma4Experts(ExpertsSpec):
    """Experts in addition to a layer's dense block.

    Their router has a norm and a factor per expert.
    """

    def weights(self, prefix: str, hidden: int) -> Iterator[WeightSpec]:
        """Yield the spec of every tensor of the mixture in the layer named `prefix`."""
        router, count = f"{prefix}.router", self.num_experts
        yield from linear_weights(f"{router}.proj", router, (count, hidden))
        yield WeightSpec(f"{router}.scale", (hidden,), f"{prefix}.router_norm.weight", kind="norm")
        factors = f"{prefix}.expert_factors.vector"
        yield WeightSpec(f"{router}.per_expert_scale", (count,), factors, kind="norm")
        experts = f"{prefix}.experts"
        yield from (
            self._each_weight(prefix, experts, hidden)
            if self.stacked is None
            else self._stacked_weights(self.stacked, prefix, experts, hidden)
        )
        for ours, name in EXPERT_NORMS.items():
            yield norm_weight(f"{prefix}.{name}", hidden, f"{prefix}.{ours}")


def gemma4_weights(spec: Gemma4Spec) -> list[WeightSpec]:
    """Return the specs of all tensors, in the order of the layers."""
    hidden, embedding = spec.hidden_size, "model.embed_tokens.weight"
    weights = [WeightSpec(embedding, (spec.vocab_size, hidden), embedding)]
    if spec.input_size:
        weights += _model_inputs(spec)
    for layer_idx in range(spec.num_layers):
        prefix = f"model.layers.{layer_idx}"
        for place, name in spec.norms.items():
            weights.append(norm_weight(f"{prefix}.{name}", hidden, f"{prefix}.{place}"))
        weights += _attention(spec, layer_idx, f"{prefix}.self_attn")
        inner = spec.mlp_size(layer_idx)
        for shard in ("gate", "up"):
            name, target = f"{prefix}.mlp.{shard}_proj", f"{prefix}.mlp.gate_up_proj"
            weights += linear_weights(name, target, (inner, hidden), shard)
        down = f"{prefix}.mlp.down_proj"
        weights += linear_weights(down, down, (hidden, inner))
        if spec.experts is not None:
            weights += spec.experts.weights(prefix, hidden)
        if spec.input_size:
            weights += _layer_input(spec, prefix)
        scalar = f"{prefix}.layer_scalar"
        weights.append(WeightSpec(scalar, (1,), f"{scalar}.vector", kind="norm"))
    weights.append(norm_weight("model.norm", hidden))
    if not spec.tie_word_embeddings:
        weights += linear_weights("lm_head", "lm_head", (spec.vocab_size, hidden))
    return weights


def _attention(spec: Gemma4Spec, layer_idx: int, attention: str) -> Iterator[WeightSpec]:
    hidden, layer = spec.hidden_size, spec.attention(layer_idx)
    query, key = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    rows = {"q": query, "k": key, "v": key}
    if layer.keys_of is not None:
        rows = {"q": query}
    elif not spec.has_values(layer_idx):
        del rows["v"]
    bias = spec.attention_bias
    for shard, size in rows.items():
        name, target = f"{attention}.{shard}_proj", f"{attention}.qkv_proj"
        yield from linear_weights(name, target, (size, hidden), shard, bias=bias)
    output = f"{attention}.o_proj"
    yield from linear_weights(output, output, (hidden, query), bias=spec.output_bias)
    for norm in ("q_norm",) if layer.keys_of is not None else ("q_norm", "k_norm"):
        yield norm_weight(f"{attention}.{norm}", layer.head_dim)


def _model_inputs(spec: Gemma4Spec) -> Iterator[WeightSpec]:
    """Yield the specs of the weights that compute each layer's own token embeddings."""
    width = spec.num_layers * spec.input_size
    table = "model.embed_tokens_per_layer.weight"
    yield WeightSpec(table, (spec.input_vocab_size, width), table)
    projection = "model.per_layer_model_projection"
    yield from linear_weights(projection, projection, (width, spec.hidden_size))
    yield norm_weight("model.per_layer_projection_norm", spec.input_size)


def _layer_input(spec: Gemma4Spec, prefix: str) -> Iterator[WeightSpec]:
    """Yield the specs of a layer's gate, projection and norm for its own token embeddings."""
    hidden, size = spec.hidden_size, spec.input_size
    gate, projection = f"{prefix}.per_layer_input_gate", f"{prefix}.per_layer_projection"
    yield from linear_weights(gate, gate, (size, hidden))
    yield from linear_weights(projection, projection, (hidden, size))
    yield norm_weight(f"{prefix}.post_per_layer_input_norm", hidden)
