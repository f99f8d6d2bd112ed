"""Reads keys of `config.json` and `generation_config.json` that all families share. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.checkpoint.json_file import Keys, read_json_object
from runtime.errors import StartupError

# Bounds far above every known model; a greater number means that the file is broken.
MAX_VOCAB = 2**24
MAX_WIDTH = 2**20
MAX_LAYERS = 2**12
MAX_HEADS = 2**12
MAX_HEAD_DIM = 2**10
_MAX_TOP_K = 2**31 - 1


def read_config(folder: Path, overrides: dict[str, Any] | None = None) -> tuple[Keys, Keys]:
    """Read `config.json` and `generation_config.json`; the second is empty if there is none.

    Args:
        folder: a local folder, or a file that is read instead of a `config.json`.
        overrides: top-level keys that replace those of `config.json`.

    Raises:
        StartupError: there is no such folder or file, or the file is not JSON; the message has one
            line.
    """
    path = folder
    if not folder.is_file():
        if not folder.is_dir():
            raise StartupError(f"{folder} is not a folder")
        path = folder / "config.json"
        if not path.is_file():
            raise StartupError(f"{folder} has no config.json: not a model folder")
    values = {**read_json_object(path), **(overrides or {})}
    generation_path = path.with_name("generation_config.json")
    generation = Keys(
        str(generation_path),
        read_json_object(generation_path) if generation_path.is_file() else {},
    )
    return Keys(str(path), values), generation


def common_fields(config: Keys, generation: Keys) -> dict[str, Any]:
    """Return the fields of `ModelSpec` that all families share, except `context_len`.

    Raises:
        StartupError: a number is missing or out of bounds; the message has one line.
    """
    vocab_size = config.integer("vocab_size", MAX_VOCAB)
    bos = config.token_ids("bos_token_id")
    return {
        "architecture": read_architecture(config),
        "model_type": str(config.values.get("model_type", "")),
        "vocab_size": vocab_size,
        "hidden_size": config.integer("hidden_size", MAX_WIDTH),
        "eos_token_ids": _eos_token_ids(config, generation, vocab_size),
        "bos_token_id": bos[0] if bos else None,
        "dtype": _dtype(config),
        "generation_defaults": _generation_defaults(generation),
        "raw": config.values,
    }


def read_architecture(config: Keys) -> str:
    """Return the model's class name in `config.json`.

    Raises:
        StartupError: the file has no class name.
    """
    names = config.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.error("architectures", "a list with a class name, such as LlamaForCausalLM")
    return names[0]


def _eos_token_ids(config: Keys, generation: Keys, vocab_size: int) -> tuple[int, ...]:
    ids = [*generation.token_ids("eos_token_id"), *config.token_ids("eos_token_id")]
    # Ids beyond the vocabulary, which files may have, are dropped: the model has no logits for
    # them.
    return tuple(dict.fromkeys(one for one in ids if 0 <= one < vocab_size))


def _dtype(config: Keys) -> str:
    # The key is `dtype` in transformers 5 and `torch_dtype` in transformers 4; both are optional.
    key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"
    name = config.values.get(key)
    if name is None:
        return "float32"
    if not isinstance(name, str):
        raise config.error(key, "the name of a type, such as bfloat16")
    name = name.removeprefix("torch.")
    # float64 checkpoints are cast to float32, because no model is computed in float64.
    name = "float32" if name == "float64" else name
    if name not in ("float32", "float16", "bfloat16"):
        raise config.error(key, "float32, float16 or bfloat16")
    return name


def _generation_defaults(generation: Keys) -> dict[str, float | int]:
    """Return the sampling parameters that the model recommends, named as in `sampling_params`."""
    if not generation.flag("do_sample", True):
        return {}
    ranges = {
        "temperature": (0.0, 1e6),
        "top_p": (1e-9, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (1e-6, 2.0),
    }
    defaults: dict[str, float | int] = {}
    for key, (low, high) in ranges.items():
        if generation.values.get(key) is not None:
            defaults[key] = generation.number(key, low, high)
    if generation.values.get("top_k") is not None:
        # To keep all tokens, the file has 0, and the native parameter is -1.
        defaults["top_k"] = generation.integer("top_k", _MAX_TOP_K, low=-1) or -1
    return defaults
