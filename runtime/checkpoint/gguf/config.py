"""Converts the metadata of a GGUF file to a `config.json`. No torch.

Model families read the result as they read the `config.json` of a folder.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from runtime.checkpoint.config_keys import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from runtime.checkpoint.gguf.architectures import (
    ARCHITECTURES,
    PARTLY_ROTATED,
    UNROTATED,
    VARIED,
    WITH_LATENTS,
)
from runtime.checkpoint.gguf.files import open_gguf
from runtime.checkpoint.gguf.header import GgufArray, GgufFile, GgufTensor
from runtime.checkpoint.gguf.own_keys import OwnKeys, architecture_of
from runtime.checkpoint.gguf.types import FLOAT_TYPES
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.regular_file import open_regular
from runtime.checkpoint.rope_json import MAX_POSITIONS
from runtime.errors import StartupError

# Texts of tokens that end an answer, whatever the file says; llama.cpp also finds them by text.
_END_TEXTS = frozenset(
    {
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<EOT>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        # GLM ends a tool call with this token.
        "<|observation|>",
    }
)
# gpt-oss ends a message with `<|end|>`, and an answer with one of the other two.
_HARMONY_MESSAGE_END, _HARMONY_ENDS = "<|end|>", frozenset({"<|return|>", "<|call|>"})
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_FLOAT_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Keys of `generation_config.json`, by those of `general.sampling.*`.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
assert set(_FLOAT_DTYPES) == set(FLOAT_TYPES)


def gguf_configs(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a file's metadata as the content of `config.json` and `generation_config.json`.

    Raises:
        StartupError: the file is not a GGUF file, its architecture is not supported, or a number is
            missing or out of bounds; the message has one line, with the key.
    """
    file = open_gguf(path)
    return _config(file), _generation(file)


def _config(file: GgufFile) -> dict[str, Any]:
    name = architecture_of(file)
    family = ARCHITECTURES.get(name)
    if family is None:
        raise StartupError(
            f"{file.path}: GGUF architecture {name!r} is not supported."
            f" Supported: {', '.join(ARCHITECTURES)}."
        )
    keys = OwnKeys(file, name)
    config = _common(file, keys)
    config |= family(keys, config)
    return config


def _common(file: GgufFile, keys: OwnKeys) -> dict[str, Any]:
    embeddings = keys.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise StartupError(f"{file.path} has no tensor 'token_embd.weight': not a whole model")
    num_heads = keys.integer("attention.head_count", MAX_HEADS)
    of_first = _of_first_layer(keys) if architecture_of(file) in VARIED else keys
    rms, plain = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
    config: dict[str, Any] = {
        "vocab_size": embeddings.shape[0],
        "hidden_size": keys.integer("embedding_length", MAX_WIDTH),
        "num_hidden_layers": keys.integer("block_count", MAX_LAYERS),
        "intermediate_size": of_first.integer("feed_forward_length", MAX_WIDTH, 1),
        "num_attention_heads": num_heads,
        "num_key_value_heads": of_first.integer("attention.head_count_kv", MAX_HEADS, num_heads),
        "max_position_embeddings": keys.integer("context_length", MAX_POSITIONS),
        "rms_norm_eps": keys.number(plain if plain in keys.values else rms, 0.0, 1.0),
        "rope_theta": keys.number("rope.freq_base", 1.0, 1e12, 10000.0),
        "tie_word_embeddings": not keys.has("output.weight"),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "dtype": _dtype(file.tensors),
        "bos_token_id": _token_id(file, "bos_token_id"),
        "eos_token_id": _end_ids(file),
        "quantization_config": {"quant_method": "gguf"},
    }
    rope_dim = keys.integer("rope.dimension_count", MAX_HEAD_DIM, 0, low=0)
    head_dim = rope_dim
    if architecture_of(file) not in WITH_LATENTS:
        head_dim = keys.integer("attention.key_length", MAX_HEAD_DIM, rope_dim, low=0)
        if keys.integer("attention.value_length", MAX_HEAD_DIM, head_dim, low=0) != head_dim:
            raise keys.error("attention.value_length", f"{head_dim}, as attention.key_length")
    if rope_dim not in (0, head_dim) and architecture_of(file) not in UNROTATED:
        if architecture_of(file) not in PARTLY_ROTATED:
            raise keys.error(
                "rope.dimension_count", f"{head_dim}: partial rotation is not supported"
            )
        config["partial_rotary_factor"] = rope_dim / head_dim
    if head_dim:
        config["head_dim"] = head_dim
    scaling = _rope_scaling(file, keys)
    if scaling:
        factors, width = scaling.get("factors"), head_dim or config["hidden_size"] // num_heads
        if factors is not None and 2 * len(factors) != width:
            raise StartupError(
                f"{file.path}: 'rope_freqs.weight' has {len(factors)} numbers for heads of {width}"
            )
        config["rope_scaling"] = scaling
    return config


def _of_first_layer(keys: OwnKeys) -> Keys:
    """Return the keys; each list with a number per layer becomes its first number that is not 0."""
    values = {
        key: next((each for each in v if each), v[0]) if isinstance(v, list) and v else v
        for key, v in keys.values.items()
    }
    return Keys(keys.source, values)


def _rope_scaling(file: GgufFile, keys: OwnKeys) -> dict[str, Any]:
    kind = keys.values.get("rope.scaling.type", "none")
    freqs = keys.tensors.get("rope_freqs.weight")
    if freqs is not None:
        return {"rope_type": "factors", "factors": _read_factors(file, freqs)}
    long, short = (keys.tensors.get(f"rope_factors_{each}.weight") for each in ("long", "short"))
    if long is not None and short is not None:
        factors = {
            "short_factor": _read_factors(file, short),
            "long_factor": _read_factors(file, long),
        }
        scale = keys.number("rope.scaling.attn_factor", 0.0, 1e6, 1.0)
        return {"rope_type": "longrope", **factors, "attention_factor": scale}
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise keys.error("rope.scaling.type", "none, linear or yarn")
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, name in (
        ("factor", "factor"),
        ("original_context_length", "original_max_position_embeddings"),
        ("attn_factor", "attention_factor"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ):
        value = keys.values.get(f"rope.scaling.{key}")
        if value is not None:
            scaling[name] = value
    if scaling.get("factor", 1.0) in (0, 0.0, 1.0):
        return {}
    return scaling


def _read_factors(file: GgufFile, freqs: GgufTensor) -> list[float]:
    count = freqs.shape[0]
    if freqs.type.name != "F32" or len(freqs.shape) != 1 or count > MAX_HEAD_DIM:
        raise StartupError(f"{file.path}: {freqs.name!r} is not a short list of float32")
    try:
        with open_regular(freqs.file) as source:
            source.seek(freqs.start)
            data = source.read(freqs.size_bytes)
        factors = list(struct.unpack(f"<{count}f", data))
    except (OSError, struct.error) as error:
        raise StartupError(f"{file.path} cannot be read: {error}") from error
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise StartupError(f"{file.path}: {freqs.name!r} has a number that is not positive")
    return factors


def _dtype(tensors: list[GgufTensor]) -> str:
    """Return the number type that most bytes have; quantized blocks count as float32."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[_FLOAT_DTYPES.get(tensor.type.name, "float32")] += tensor.size_bytes
    return sizes.most_common(1)[0][0]


def _token_id(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _end_ids(file: GgufFile) -> list[int]:
    ids = [_token_id(file, key) for key in _END_KEYS]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, GgufArray) and tokens.is_text and ids[0] is not None:
        try:
            texts = tokens.texts()
        except ValueError as error:
            raise StartupError(f"{file.path}: 'tokenizer.ggml.tokens': {error}") from error
        ends = _END_TEXTS
        if set(texts) >= _HARMONY_ENDS:
            ends = ends - {_HARMONY_MESSAGE_END} | _HARMONY_ENDS
        ids += [token_id for token_id, text in enumerate(texts) if text in ends]
    return list(dict.fromkeys(one for one in ids if one is not None))


def _generation(file: GgufFile) -> dict[str, Any]:
    found = {}
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            found[name] = value
    return found
