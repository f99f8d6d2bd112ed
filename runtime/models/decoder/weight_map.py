"""The weight map of a decoder: the target of each checkpoint tensor. Imports no torch.

The map has three uses. A check compares it with the headers of checkpoint files before torch is
imported. The loader uses it to fill parameters. Dummy weights are made from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from runtime.checkpoint.attention_spec import LatentAttentionSpec
from runtime.checkpoint.model_spec import WeightKind, WeightSpec

if TYPE_CHECKING:
    from runtime.models.decoder.spec import DecoderSpec

# Buffers that old versions of `transformers` saved. Models compute them from `config.json`.
_OLD_BUFFER = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


def is_old_buffer(name: str) -> bool:
    """Whether the tensor `name` is a saved rotary table, which models compute themselves."""
    return _OLD_BUFFER.search(name) is not None


def decoder_weights(spec: DecoderSpec) -> list[WeightSpec]:
    """Return the spec of every tensor of a decoder, in the order of the layers."""
    hidden = spec.hidden_size
    embedding = "model.embed_tokens.weight"
    weights = [WeightSpec(embedding, (spec.vocab_size, hidden), embedding)]
    for layer_idx in range(spec.num_layers):
        prefix = f"model.layers.{layer_idx}"
        for place, name in spec.norms.items():
            weights += _stream_norm(spec, f"{prefix}.{name}", f"{prefix}.{place}")
        recurrence = spec.recurrence(layer_idx)
        if recurrence is None:
            weights += attention_weights(spec, layer_idx, prefix)
        else:
            weights += recurrence.weights(prefix, hidden)
        if spec.experts is not None and layer_idx in spec.experts.layers:
            weights += spec.experts.weights(prefix, hidden)
        else:
            weights += mlp_weights(spec, f"{prefix}.mlp")
    weights += _stream_norm(spec, "model.norm", "model.norm")
    if spec.gives == "tokens" and not spec.tie_word_embeddings:
        weights += linear_weights("lm_head", "lm_head", (spec.vocab_size, hidden))
    return weights


def renamed(name: str, names: Mapping[str, str]) -> str:
    """Return a family's name of a weight, given Llama's name.

    Args:
        name: Llama's name.
        names: maps parts of Llama's names to the family's. Only the first part that occurs in
            `name` is replaced.
    """
    for ours, theirs in names.items():
        if ours in name:
            return name.replace(ours, theirs)
    return name


def norm_weight(
    name: str, size: int, target: str = "", *, zero_centered: bool = False
) -> WeightSpec:
    """Return the spec of a norm's weight, `[size]`.

    Args:
        name: the norm's name in the checkpoint.
        size: elements of the weight.
        target: the norm's name in our model; empty if it is `name`.
        zero_centered: whether the norm multiplies by `1 + weight`.
    """
    kind: WeightKind = "zero_centered_norm" if zero_centered else "norm"
    return WeightSpec(f"{name}.weight", (size,), f"{target or name}.weight", kind=kind)


def _stream_norm(spec: DecoderSpec, name: str, target: str) -> Iterator[WeightSpec]:
    size = spec.hidden_size
    yield norm_weight(name, size, target, zero_centered=spec.zero_centered_norms)
    if spec.has_norm_biases:
        yield WeightSpec(f"{name}.bias", (size,), f"{target}.bias", kind="bias")


def linear_weights(
    name: str, target: str, shape: tuple[int, int], shard: str = "", *, bias: bool = False
) -> list[WeightSpec]:
    """Return the specs of a matrix and, if `bias` is set, of its bias.

    Args:
        name: the linear layer's name in the checkpoint.
        target: the linear layer's name in our model.
        shape: rows and columns of the matrix.
        shard: the part of the target that this matrix is, such as `q` of `qkv_proj`.
        bias: whether the layer has a bias, `[rows]`.
    """
    weights = [WeightSpec(f"{name}.weight", shape, f"{target}.weight", shard)]
    if bias:
        weights.append(WeightSpec(f"{name}.bias", shape[:1], f"{target}.bias", shard, kind="bias"))
    return weights


def attention_weights(spec: DecoderSpec, layer_idx: int, prefix: str) -> list[WeightSpec]:
    """Return the specs of all tensors of the attention in the layer named `prefix`."""
    hidden, attention, of_layer = spec.hidden_size, f"{prefix}.self_attn", spec.attention(layer_idx)
    if isinstance(of_layer, LatentAttentionSpec):
        return list(_latent_weights(spec, of_layer, attention))
    head_dim = of_layer.head_dim
    query, key = of_layer.num_heads * head_dim, of_layer.num_kv_heads * head_dim
    zero_centered = spec.zero_centered_norms
    weights: list[WeightSpec] = []
    target = f"{attention}.qkv_proj"
    if spec.fused_qkv:
        fused = (query + 2 * key, hidden)
        weights += linear_weights(target, target, fused, bias=spec.attention_bias)
    parts = (("q", query * (2 if of_layer.has_gate else 1)), ("k", key), ("v", key))
    for shard, rows in () if spec.fused_qkv else parts:
        name = f"{attention}.{shard}_proj"
        weights += linear_weights(name, target, (rows, hidden), shard, bias=spec.attention_bias)
    output = f"{attention}.o_proj"
    weights += linear_weights(output, output, (hidden, query), bias=spec.output_bias)
    if of_layer.has_sinks:
        shape = (of_layer.num_heads,)
        weights.append(
            WeightSpec(f"{attention}.sinks", shape, f"{attention}.sinks.vector", kind="bias")
        )
    if spec.quantization is not None and not of_layer.has_gate:
        weights += [
            WeightSpec(name, (1,), f"{attention}.kv_scales.{which}", kind="scale")
            for which, name in spec.quantization.kv_scales(attention).items()
        ]
    if spec.qk_norm:
        weights += [
            norm_weight(
                f"{attention}.{norm}",
                rows if spec.has_joint_qk_norm else head_dim,
                zero_centered=zero_centered,
            )
            for norm, rows in (("q_norm", query), ("k_norm", key))
        ]
    return weights


def _latent_weights(
    spec: DecoderSpec, latent: LatentAttentionSpec, attention: str
) -> Iterator[WeightSpec]:
    """Yield the tensors of attention over latents.

    The products that read the hidden state are fused.
    """
    hidden, heads, bias = spec.hidden_size, latent.num_heads, spec.attention_bias
    query, rank = heads * (latent.nope_dim + latent.rope_dim), latent.query_rank
    both = f"{attention}.qkv_a_proj"
    name, rows = ("q_a_proj", rank) if rank else ("q_proj", query)
    yield from linear_weights(f"{attention}.{name}", both, (rows, hidden), "q", bias=bias)
    kv = f"{attention}.kv_a_proj_with_mqa"
    yield from linear_weights(kv, both, (latent.head_dim, hidden), "kv", bias=bias)
    if rank:
        yield norm_weight(f"{attention}.q_a_layernorm", rank)
        name = f"{attention}.q_b_proj"
        yield from linear_weights(name, name, (query, rank))
    yield norm_weight(f"{attention}.kv_a_layernorm", latent.value_dim)
    up = {"kv_b_proj": (heads * (latent.nope_dim + latent.output_dim), latent.value_dim)}
    if latent.has_split_up:
        up = {
            "k_b_proj": (heads * latent.value_dim, latent.nope_dim),
            "v_b_proj": (heads * latent.output_dim, latent.value_dim),
        }
    for part, shape in up.items():
        name = f"{attention}.{part}"
        yield from linear_weights(name, name, shape)
    name, columns = f"{attention}.o_proj", heads * latent.output_dim
    yield from linear_weights(name, name, (hidden, columns), bias=spec.output_bias)


def mlp_weights(spec: DecoderSpec, mlp: str) -> list[WeightSpec]:
    """Return the specs of all tensors of the dense feed-forward block named `mlp`."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    weights: list[WeightSpec] = []
    if spec.ungated_mlp is not None:
        ungated = spec.ungated_mlp
        up, out = (inner, hidden), (hidden, inner)
        weights += linear_weights(f"{mlp}.{ungated.up}", f"{mlp}.up_proj", up, bias=spec.mlp_bias)
        down = f"{mlp}.{ungated.down}"
        return weights + linear_weights(down, f"{mlp}.down_proj", out, bias=spec.mlp_bias)
    target = f"{mlp}.gate_up_proj"
    if spec.fused_gate_up:
        weights += linear_weights(target, target, (2 * inner, hidden), bias=spec.mlp_bias)
    for shard in () if spec.fused_gate_up else ("gate", "up"):
        name = f"{mlp}.{shard}_proj"
        weights += linear_weights(name, target, (inner, hidden), shard, bias=spec.mlp_bias)
    down = f"{mlp}.down_proj"
    weights += linear_weights(down, down, (hidden, inner), bias=spec.mlp_bias)
    return weights
