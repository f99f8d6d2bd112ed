"""The weight map: which checkpoint tensor goes where. Front-safe: no torch.

One source of truth: the check compares headers with it before torch is imported, the loader fills
parameters by it, dummy weights are made from it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from runtime.checkpoint.model_config import ModelConfig

# Buffers that old versions saved; every model computes them itself.
_IGNORED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


@dataclass(frozen=True)
class WeightSpec:
    """One tensor that a checkpoint must have.

    Attributes:
        name: in the checkpoint.
        shape: whole, before any cut among ranks.
        target: our parameter, such as `model.layers.0.self_attn.qkv_proj.weight`.
        slot: which part of the parameter (`q`, `gate`, ...); empty when it is all of it.
        kind: what it is, for initial values of dummy weights.
    """

    name: str
    shape: tuple[int, ...]
    target: str
    slot: str = ""
    kind: Literal["matrix", "bias", "norm"] = "matrix"


def decoder_weights(config: ModelConfig) -> list[WeightSpec]:
    """Return every tensor of a dense decoder, in the order of the layers."""
    hidden = config.hidden_size
    embedding = "model.embed_tokens.weight"
    specs = [WeightSpec(embedding, (config.vocab_size, hidden), embedding)]
    for layer_idx in range(config.num_layers):
        specs += _layer_weights(config, f"model.layers.{layer_idx}")
    specs.append(_norm("model.norm", hidden))
    if not config.tie_word_embeddings:
        specs += _linear("", "lm_head", "lm_head", "", (config.vocab_size, hidden), False)
    return specs


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Return whether a checkpoint tensor that no spec names is known to be superfluous."""
    # A tied head repeats the embeddings.
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    return _IGNORED.search(name) is not None


def _layer_weights(config: ModelConfig, prefix: str) -> list[WeightSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    specs = [_norm(f"{prefix}.input_layernorm", hidden)]
    for slot, rows in (("q", query), ("k", key), ("v", key)):
        specs += _linear(
            attention, f"{slot}_proj", "qkv_proj", slot, (rows, hidden), config.attention_bias
        )
    specs += _linear(attention, "o_proj", "o_proj", "", (hidden, query), config.output_bias)
    if config.qk_norm:
        specs.append(_norm(f"{attention}.q_norm", config.head_dim))
        specs.append(_norm(f"{attention}.k_norm", config.head_dim))
    specs.append(_norm(f"{prefix}.post_attention_layernorm", hidden))
    for slot in ("gate", "up"):
        shape = (inner, hidden)
        specs += _linear(mlp, f"{slot}_proj", "gate_up_proj", slot, shape, config.mlp_bias)
    specs += _linear(mlp, "down_proj", "down_proj", "", (hidden, inner), config.mlp_bias)
    return specs


def _norm(name: str, size: int) -> WeightSpec:
    return WeightSpec(f"{name}.weight", (size,), f"{name}.weight", kind="norm")


def _linear(
    prefix: str, name: str, target: str, slot: str, shape: tuple[int, int], bias: bool
) -> list[WeightSpec]:
    dotted = f"{prefix}." if prefix else ""
    name, target = dotted + name, dotted + target
    specs = [WeightSpec(f"{name}.weight", shape, f"{target}.weight", slot)]
    if bias:
        specs.append(WeightSpec(f"{name}.bias", shape[:1], f"{target}.bias", slot, kind="bias"))
    return specs
