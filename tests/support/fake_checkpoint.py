"""Writes model folders with a valid `config.json` and weights of zeros, without torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runtime.checkpoint.headers import DTYPE_BITS
from runtime.models.registry import read_model_spec

LLAMA_JSON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}


def write_config(folder: Path, **changes: Any) -> Path:
    """Write the `config.json` of a small Llama; the value `...` removes a key."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: one for key, one in {**LLAMA_JSON, **changes}.items() if one is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def write_safetensors(
    path: Path, tensors: Iterable[tuple[str, tuple[int, ...]]], dtype: str = "BF16"
) -> None:
    """Write a safetensors file in which all tensors are zero."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        start, end = end, end + math.prod(shape) * DTYPE_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a complete model folder: configuration and one weight file."""
    write_config(folder, **changes)
    write_safetensors(folder / "model.safetensors", expected_tensors(folder).items())
    return folder


def expected_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that the folder's `config.json` requires."""
    return {spec.name: spec.shape for spec in read_model_spec(folder).weights}


def write_shards(folder: Path, tensors: dict[str, tuple[int, ...]], num_shards: int = 2) -> None:
    """Write tensors of zeros to several files with an index."""
    weight_map = {}
    names = list(tensors)
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        mine = names[shard::num_shards]
        write_safetensors(folder / file_name, [(name, tensors[name]) for name in mine])
        weight_map |= dict.fromkeys(mine, file_name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
