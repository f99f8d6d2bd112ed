"""Converts the keys of Qwen's mixtures of experts to those of `config.json`. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.checkpoint.gguf.own_keys import OwnKeys


def with_experts(
    architecture: str, *, sums_to_one: bool
) -> Callable[[OwnKeys, dict[str, Any]], dict[str, Any]]:
    """Return a function that converts the keys of a Qwen with experts to those of `config.json`.

    Args:
        architecture: the model's class in `config.json`.
        sums_to_one: whether the scores of the chosen experts are scaled to a sum of one.
    """

    def read(keys: OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
        # Files of old converters do not have these sizes, so they are read from the tensors'
        # shapes.
        layers = range(config["num_hidden_layers"])
        dense = [index for index in layers if keys.has(f"blk.{index}.ffn_gate.weight")]
        sparse = next((index for index in layers if index not in dense), 0)
        expert = keys.tensors.get(f"blk.{sparse}.ffn_gate_exps.weight")
        shared = keys.tensors.get(f"blk.{sparse}.ffn_gate_shexp.weight")
        return {
            "architectures": [architecture],
            "num_experts": keys.values.get("expert_count"),
            "num_experts_per_tok": keys.values.get("expert_used_count"),
            "moe_intermediate_size": keys.values.get(
                "expert_feed_forward_length",
                expert.shape[1] if expert is not None and len(expert.shape) == 3 else None,
            ),
            "shared_expert_intermediate_size": keys.values.get(
                "expert_shared_feed_forward_length", shared.shape[0] if shared is not None else None
            ),
            "norm_topk_prob": sums_to_one,
            "mlp_only_layers": dense,
        }

    return read
