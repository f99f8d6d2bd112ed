"""Tiny random folders of the families that `tests/numerics/test_families.py` compares.

A family whose layers differ only in numbers stands in `tiny_models`, whose variants go through more
tests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from tests.support.tiny_models import ENDOFTEXT_ID, TinyModel, write_tiny

_WINDOWS = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

TINY_FAMILIES: dict[str, TinyModel] = {
    # Sinks, windows, biases of experts, a clamped gate, all experts in one tensor.
    "gpt_oss": TinyModel(
        "GptOssForCausalLM",
        {**_WINDOWS, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
}


@cache
def tiny_family(name: str) -> Path:
    """Return the folder of the variant `name`, made on first use; do not write into it."""
    variant = TINY_FAMILIES[name]
    options = {"pad_token_id": ENDOFTEXT_ID, **variant.options}
    return write_tiny(name, replace(variant, options=options))
