"""Which method reads a checkpoint of compressed-tensors (llm-compressor). Front-safe: no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.checkpoint.model_spec import Quantization
from runtime.models.quantization.fp8.front import read as read_fp8
from runtime.models.quantization.groups.front import read as read_groups

PACKED = "pack-quantized"


def read(path: Path, words: Mapping[str, Any]) -> Quantization:
    """Read the words of either method.

    Raises:
        StartupError: a scheme that is not supported; one line that names it and its modules.
    """
    groups = words.get("config_groups")
    formats = [words.get("format")]
    if isinstance(groups, dict):
        formats += [group.get("format") for group in groups.values() if isinstance(group, dict)]
    return read_groups(path, words) if PACKED in formats else read_fp8(path, words)
