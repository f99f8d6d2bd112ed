"""Rearranges the tensors of models with recurrent layers, as llama.cpp's converter does.

The functions only move numbers and never change them, so they also work on indices. That is how
`stands_for` finds where a number of a GGUF tensor belongs in a checkpoint.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_DELTA_NET = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_ba.weight": "ssm_ba.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
_MAMBA = {
    "in_proj.weight": "ssm_in.weight",
    "in_proj.bias": "ssm_in.bias",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a",
    "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
    "out_proj.bias": "ssm_out.bias",
}
_ATTENTION = {
    f"{ours}_proj.weight": f"attn_{theirs}.weight"
    for ours, theirs in {"q": "q", "k": "k", "v": "v", "o": "output"}.items()
}
_NEMOTRON_H = {
    "norm.weight": "attn_norm.weight",
    **{f"mixer.{ours}": theirs for ours, theirs in {**_MAMBA, **_ATTENTION}.items()},
    "mixer.up_proj.weight": "ffn_up.weight",
    "mixer.down_proj.weight": "ffn_down.weight",
}
_GRANITE = {f"mamba.{ours}": theirs for ours, theirs in _MAMBA.items()}
_NAMES = {
    "granitehybrid": _GRANITE,
    "nemotron_h": _NEMOTRON_H,
    "qwen3next": _DELTA_NET,
    "qwen35": _DELTA_NET,
    "qwen35moe": _DELTA_NET,
}
HYBRIDS = frozenset(_NAMES)
_TOP = {
    "backbone.embeddings.weight": "token_embd.weight",
    "backbone.norm_f.weight": "output_norm.weight",
}


def rearranged(
    full: str, weight: Tensor, architecture: str, config: dict[str, Any], *, is_old: bool = False
) -> dict[str, Tensor] | None:
    """Return the tensors that a checkpoint's tensor becomes, by their names in GGUF.

    Args:
        full: the tensor's name in the checkpoint.
        weight: its numbers, or their indices.
        architecture: the architecture's name in GGUF.
        config: content of the model's `config.json`.
        is_old: leave the rows of Qwen3-Next's `in_proj_qkvz` as they are, like old converters.

    Returns:
        The tensors; None if only the name of this tensor changes, as in other architectures.
    """
    if full in _TOP:
        return {_TOP[full]: weight}
    if ".layers." not in full:
        return None
    layer, name = full.split(".layers.")[1].split(".", 1)
    found = _in_layer(name, weight, architecture, config, is_old=is_old)
    return found and {f"blk.{layer}.{part}": each for part, each in found.items()}


def _in_layer(
    name: str, weight: Tensor, architecture: str, config: dict[str, Any], *, is_old: bool
) -> dict[str, Tensor] | None:
    if "shared_mlp." in name:
        end = "_shexp" if config.get("num_local_experts") else ""
        if "output" in name:
            return {f"ffn_down{end}.weight": weight}
        gate, up = weight.chunk(2)
        return {f"ffn_gate{end}.weight": gate, f"ffn_up{end}.weight": up}
    if name == "linear_attn.in_proj_qkvz.weight":
        return {"ssm_in.weight": weight} if is_old else _flat_inputs(weight, config)
    if name.endswith(("q_proj.weight", "k_proj.weight")) and architecture in (
        "granitehybrid",
        "nemotron_h",
    ):
        which = "attention" if "q_proj" in name else "key_value"
        heads = config[f"num_{which}_heads"]
        weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        return {f"attn_{name.split('_proj')[0][-1]}.weight": weight}
    part = _NAMES[architecture].get(name)
    if part is None:
        return None
    if part == "ssm_conv1d.weight":
        weight = weight.squeeze(1)
    if architecture in ("qwen35", "qwen35moe"):
        weight = _tiled(part, weight, config)
    if architecture in ("granitehybrid", "nemotron_h"):
        if part in ("ssm_a", "ssm_d"):
            weight = weight.unsqueeze(1)
        if part == "ssm_norm.weight":
            groups = config.get("n_groups") or config.get("mamba_n_groups") or 1
            weight = weight.view(groups, -1)
    return {part: weight}


def _flat_inputs(weight: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    groups = weight.unflatten(0, (keys, -1))
    q, k, v, z = (each.flatten(0, 1) for each in groups.split([key, key, value, value], dim=1))
    return {"attn_qkv.weight": torch.cat([q, k, v]), "attn_gate.weight": z}


def _tiled(part: str, weight: Tensor, config: dict[str, Any]) -> Tensor:
    keys, key = config["linear_num_key_heads"], config["linear_key_head_dim"]
    ratio = config["linear_num_value_heads"] // keys
    if part == "ssm_out.weight":
        return weight.unflatten(1, (keys, ratio, -1)).transpose(1, 2).flatten(1)
    if part in ("post_attention_norm.weight", "ssm_norm.weight"):
        return weight
    before = 2 * keys * key if part in ("attn_qkv.weight", "ssm_conv1d.weight") else 0
    values = weight[before:].unflatten(0, (keys, ratio, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat([weight[:before], values])


def put_back(
    full: str, shape: torch.Size, values: dict[str, Tensor], *rest: Any, **options: Any
) -> Tensor:
    """Return a checkpoint's tensor of `shape`, given the tensors that `rearranged` makes of it."""
    indices = torch.arange(shape.numel()).view(shape)
    found = torch.empty(shape.numel())
    for name, places in (rearranged(full, indices, *rest, **options) or {}).items():
        found[places.flatten()] = values[name].flatten()
    return found.view(shape)
