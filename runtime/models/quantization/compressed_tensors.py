"""Selects the quantization method of a compressed-tensors (llm-compressor) checkpoint.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from runtime.checkpoint.model_spec import Quantization
from runtime.models.quantization.fp8.front import read as read_fp8
from runtime.models.quantization.groups.front import read as read_groups

PACKED = "pack-quantized"


def read(path: Path, words: Mapping[str, Any]) -> Quantization:
    """Return the quantization that `quantization_config` describes; its scheme selects the method.

    Args:
        path: path of the model.
        words: the content of `quantization_config`.

    Raises:
        StartupError: a scheme is not supported; the message names it and its modules.
    """
    groups = words.get("config_groups")
    formats = [words.get("format")]
    if isinstance(groups, dict):
        formats += [group.get("format") for group in groups.values() if isinstance(group, dict)]
    kept = _kv_cache_dtype(words.get("kv_cache_scheme"))
    if PACKED in formats:
        return replace(read_groups(path, words), kv_cache_dtype=kept)
    return replace(read_fp8(path, words), kv_cache_dtype=kept)


def _kv_cache_dtype(scheme: object) -> str:
    """Return the form of keys and values in the KV cache, `fp8_e4m3` or `auto`.

    `auto` takes the place of 8-bit forms other than E4M3: 16 bits are more precise.
    """
    given = scheme if isinstance(scheme, dict) else {}
    is_e4m3 = given.get("type") == "float" and given.get("num_bits") == 8
    return "fp8_e4m3" if is_e4m3 else "auto"
