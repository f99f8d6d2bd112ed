"""Writes the keys of GGUF files that only one architecture has, as llama.cpp's converter does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np


def _minimax_m2(
    writer: gguf.GGUFWriter,
    config: dict[str, Any],
    head_dim: int,
) -> None:
    writer.add_rope_dimension_count(config["rotary_dim"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])


def _mistral3(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _phi3(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    rope = config["rope_parameters"]
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
    writer.add_sliding_window(config["sliding_window"] or 0)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for which in ("long", "short"):
            factors = np.array(rope[f"{which}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{which}.weight", factors)


# By architecture: functions that take the writer, the configuration and the size of a head.
FAMILY_KEYS: dict[str, Callable[[gguf.GGUFWriter, dict[str, Any], int], None]] = {
    "minimax-m2": _minimax_m2,
    "mistral3": _mistral3,
    "phi3": _phi3,
}
