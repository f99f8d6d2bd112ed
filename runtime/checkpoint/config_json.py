"""`config.json` and `generation_config.json` become a `ModelConfig`. Front-safe: no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.checkpoint.families import Family, find_family
from runtime.checkpoint.json_file import Keys, read_json_object
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.rope_json import read_rope
from runtime.errors import StartupError

# Beyond every known model by a wide margin; what is larger is a broken file, not a model.
_MAX_VOCAB = 2**24
_MAX_WIDTH = 2**20
_MAX_LAYERS = 2**12
_MAX_HEADS = 2**12
_MAX_HEAD_DIM = 2**10
_MAX_TOP_K = 2**31 - 1


def load_model_config(folder: Path, overrides: dict[str, Any] | None = None) -> ModelConfig:
    """Read what a model folder says about its model.

    Args:
        folder: local, with `config.json` and perhaps `generation_config.json`.
        overrides: top-level keys that replace those of `config.json`.

    Raises:
        StartupError: no such file, an unsupported architecture or feature, a number that is
            missing or absurd; one line that names the key.
    """
    if not folder.is_dir():
        raise StartupError(f"{folder} is not a folder")
    path = folder / "config.json"
    if not path.is_file():
        raise StartupError(f"{folder} has no config.json: not a model folder")
    values = {**read_json_object(path), **(overrides or {})}
    generation_path = folder / "generation_config.json"
    generation = Keys(
        str(generation_path),
        read_json_object(generation_path) if generation_path.is_file() else {},
    )
    return _model_config(Keys(str(path), values), generation)


def _model_config(config: Keys, generation: Keys) -> ModelConfig:
    values = config.values
    architecture = _architecture(config)
    family = find_family(architecture, brings_code="auto_map" in values)
    _refuse_unsupported(config)
    hidden_size = config.integer("hidden_size", _MAX_WIDTH)
    num_layers = config.integer("num_hidden_layers", _MAX_LAYERS)
    num_heads = config.integer("num_attention_heads", _MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", _MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of {num_heads} attention heads")
    vocab_size = config.integer("vocab_size", _MAX_VOCAB)
    rope, context_len = read_rope(config)
    window, windowed_layers = _windows(config, family, num_layers)
    has_bias = family.biases == "keyed" and config.flag("attention_bias", False)
    bos = config.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        model_type=str(values.get("model_type", "")),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", _MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, family, hidden_size, num_heads),
        rms_norm_eps=config.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=rope,
        context_len=context_len,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=has_bias or family.biases == "qkv",
        output_bias=has_bias,
        mlp_bias=family.has_mlp_bias and config.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        sliding_window=window,
        windowed_layers=windowed_layers,
        eos_token_ids=_eos_token_ids(config, generation, vocab_size),
        bos_token_id=bos[0] if bos else None,
        dtype=_dtype(config),
        generation_defaults=_generation_defaults(generation),
        raw=values,
    )


def _architecture(config: Keys) -> str:
    names = config.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise config.error("architectures", "a list with a class name, such as LlamaForCausalLM")
    return names[0]


def _refuse_unsupported(config: Keys) -> None:
    quantization = config.mapping("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise StartupError(
            f"{config.source}: weights quantized with {method!r} are not supported;"
            " use a bfloat16, float16 or float32 checkpoint"
        )
    if config.values.get("hidden_act", "silu") not in ("silu", "swish", None):
        raise config.error("hidden_act", "'silu'")


def _head_dim(config: Keys, family: Family, hidden_size: int, num_heads: int) -> int:
    if config.values.get("head_dim") is None and family.head_dim is None:
        if hidden_size % num_heads or hidden_size // num_heads % 2:
            raise config.error("hidden_size", f"an even multiple of {num_heads} attention heads")
        return hidden_size // num_heads
    head_dim = config.integer("head_dim", _MAX_HEAD_DIM, family.head_dim, low=2)
    if head_dim % 2:
        raise config.error("head_dim", "an even number: halves of a head rotate together")
    return head_dim


def _windows(
    config: Keys, family: Family, num_layers: int
) -> tuple[int | None, frozenset[int] | None]:
    """Return the window and the layers that have it, `None` for all of them."""
    if family.window == "never":
        return None, None
    if family.window == "switched" and not config.flag("use_sliding_window", False):
        return None, None
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        return None, None
    window = config.integer("sliding_window", 2**31 - 1, family.default_window)
    if family.window == "always":
        return window, None
    kinds = config.values.get("layer_types")
    if kinds is not None:
        known = {"full_attention", "sliding_attention"}
        if not isinstance(kinds, list) or len(kinds) != num_layers or not known.issuperset(kinds):
            raise config.error(
                "layer_types", f"{num_layers} of full_attention or sliding_attention"
            )
        layers = frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    else:
        first = config.integer("max_window_layers", _MAX_LAYERS, 28, low=0)
        layers = frozenset(range(first, num_layers))
    return (window, layers) if layers else (None, None)


def _eos_token_ids(config: Keys, generation: Keys, vocab_size: int) -> tuple[int, ...]:
    ids = [*generation.token_ids("eos_token_id"), *config.token_ids("eos_token_id")]
    # Files name ids beyond the vocabulary that can never come out; masking them would be an error.
    return tuple(dict.fromkeys(one for one in ids if 0 <= one < vocab_size))


def _dtype(config: Keys) -> str:
    # Version 5 calls it `dtype`, version 4 `torch_dtype`; neither needs to be there.
    key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"
    name = config.values.get(key)
    if name is None:
        return "float32"
    if not isinstance(name, str):
        raise config.error(key, "the name of a type, such as bfloat16")
    name = name.removeprefix("torch.")
    # Wider checkpoints are cast: nothing runs in float64.
    name = "float32" if name == "float64" else name
    if name not in ("float32", "float16", "bfloat16"):
        raise config.error(key, "float32, float16 or bfloat16")
    return name


def _generation_defaults(generation: Keys) -> dict[str, float | int]:
    """Return the sampling keys the model's authors recommend, in the native API's terms."""
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
        # 0 keeps all tokens there, -1 here.
        defaults["top_k"] = generation.integer("top_k", _MAX_TOP_K, low=-1) or -1
    return defaults
