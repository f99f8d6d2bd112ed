"""Converts a GGUF file's metadata into a `config.json`. Front-safe: no torch.

The families read the result like any folder's file, so a family needs only a line in
`_ARCHITECTURES` to support GGUF.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runtime.checkpoint.config_keys import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, MAX_WIDTH
from runtime.checkpoint.gguf.files import open_gguf
from runtime.checkpoint.gguf.header import GgufArray, GgufFile, GgufTensor
from runtime.checkpoint.gguf.types import FLOAT_TYPES
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.regular_file import open_regular
from runtime.checkpoint.rope_json import MAX_POSITIONS
from runtime.errors import StartupError

# Tokens that end an answer whatever the file names; llama.cpp recognizes them by text, too.
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
    }
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_FLOAT_DTYPES = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Keys of `general.sampling.*` to those of `generation_config.json`.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# llama.cpp's number of the function that scores experts.
_SIGMOID = 2
# Architectures whose heads may rotate in part.
_PARTLY_ROTATED = frozenset({"glm4moe"})


def gguf_configs(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the file's metadata as `config.json` and `generation_config.json`.

    Raises:
        StartupError: the file is not a GGUF file, the architecture is not supported, or a number is
            missing or absurd; the message is one line that names the key.
    """
    file = open_gguf(path)
    return _config(file), _generation(file)


def architecture_of(file: GgufFile) -> str:
    """Return the name of the model's architecture, as llama.cpp calls it.

    Raises:
        StartupError: the metadata names no architecture.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise StartupError(f"{file.path}: 'general.architecture' is missing")
    return name


def _config(file: GgufFile) -> dict[str, Any]:
    name = architecture_of(file)
    family = _ARCHITECTURES.get(name)
    if family is None:
        raise StartupError(
            f"{file.path}: GGUF architecture {name!r} is not supported."
            f" Supported: {', '.join(_ARCHITECTURES)}."
        )
    keys = _OwnKeys(file, name)
    config = _common(file, keys)
    config |= family(keys, config)
    return config


class _OwnKeys(Keys):
    """The keys of the architecture, without its name as a prefix."""

    def __init__(self, file: GgufFile, name: str) -> None:
        prefix = f"{name}."
        own = {
            key.removeprefix(prefix): _same(value)
            for key, value in file.metadata.items()
            if key.startswith(prefix)
        }
        super().__init__(f"{file.path}: {name}", own)
        self.file = file
        self.tensors = {tensor.name: tensor for tensor in file.tensors}

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this name."""
        return tensor in self.tensors


def _same(value: Any) -> Any:
    """Return one number instead of an array with the same number for each layer."""
    if isinstance(value, GgufArray) and not value.is_text and value.count:
        numbers = value.numbers() if value.data else []
        if numbers and all(number == numbers[0] for number in numbers):
            return numbers[0]
        return numbers
    return value


def _common(file: GgufFile, keys: _OwnKeys) -> dict[str, Any]:
    embeddings = keys.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise StartupError(f"{file.path} has no tensor 'token_embd.weight': not a whole model")
    num_heads = keys.integer("attention.head_count", MAX_HEADS)
    config: dict[str, Any] = {
        "vocab_size": embeddings.shape[0],
        "hidden_size": keys.integer("embedding_length", MAX_WIDTH),
        "num_hidden_layers": keys.integer("block_count", MAX_LAYERS),
        "intermediate_size": keys.integer("feed_forward_length", MAX_WIDTH, 1),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", MAX_HEADS, num_heads),
        "max_position_embeddings": keys.integer("context_length", MAX_POSITIONS),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        "rope_theta": keys.number("rope.freq_base", 1.0, 1e12, 10000.0),
        "tie_word_embeddings": not keys.has("output.weight"),
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "dtype": _dtype(file.tensors),
        "bos_token_id": _token_id(file, "bos_token_id"),
        "eos_token_id": _end_ids(file),
        "quantization_config": {"quant_method": "gguf"},
    }
    rope_dim = keys.integer("rope.dimension_count", MAX_HEAD_DIM, 0, low=0)
    head_dim = keys.integer("attention.key_length", MAX_HEAD_DIM, rope_dim, low=0)
    if keys.integer("attention.value_length", MAX_HEAD_DIM, head_dim, low=0) != head_dim:
        raise keys.error("attention.value_length", f"{head_dim}, as attention.key_length")
    if rope_dim not in (0, head_dim):
        if architecture_of(file) not in _PARTLY_ROTATED:
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


def _rope_scaling(file: GgufFile, keys: _OwnKeys) -> dict[str, Any]:
    kind = keys.values.get("rope.scaling.type", "none")
    freqs = keys.tensors.get("rope_freqs.weight")
    if freqs is not None:
        return {"rope_type": "factors", "factors": _read_factors(file, freqs)}
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
        raise StartupError(f"{file.path}: 'rope_freqs.weight' is not a short list of float32")
    try:
        with open_regular(freqs.file) as source:
            source.seek(freqs.start)
            data = source.read(freqs.size_bytes)
        factors = list(struct.unpack(f"<{count}f", data))
    except (OSError, struct.error) as error:
        raise StartupError(f"{file.path} cannot be read: {error}") from error
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise StartupError(f"{file.path}: 'rope_freqs.weight' has a number that is not positive")
    return factors


def _dtype(tensors: list[GgufTensor]) -> str:
    """Return the type of most of the bytes; blocks are multiplied by float32 activations."""
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
        ids += [token_id for token_id, text in enumerate(texts) if text in _END_TEXTS]
    return list(dict.fromkeys(one for one in ids if one is not None))


def _generation(file: GgufFile) -> dict[str, Any]:
    found = {}
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float):
            found[name] = value
    return found


# ---- architectures ----


def _llama(keys: _OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if not keys.values.get("expert_count"):
        return {"architectures": ["LlamaForCausalLM"], "mlp_bias": keys.has("blk.0.ffn_gate.bias")}
    return {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": keys.values.get("expert_count"),
        "num_experts_per_tok": keys.values.get("expert_used_count"),
        "intermediate_size": keys.values.get(
            "expert_feed_forward_length", config["intermediate_size"]
        ),
        "sliding_window": None,
    }


def _plain(architecture: str) -> Callable[[_OwnKeys, dict[str, Any]], dict[str, Any]]:
    return lambda keys, config: {"architectures": [architecture]}  # noqa: ARG005  # nothing else to say


def _moe(
    architecture: str, *, sums_to_one: bool
) -> Callable[[_OwnKeys, dict[str, Any]], dict[str, Any]]:
    def read(keys: _OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
        # Files of old converters omit these sizes: they follow from the tensors.
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
                "expert_feed_forward_length", expert.shape[1] if expert is not None else None
            ),
            "shared_expert_intermediate_size": keys.values.get(
                "expert_shared_feed_forward_length", shared.shape[0] if shared is not None else None
            ),
            "norm_topk_prob": sums_to_one,
            "mlp_only_layers": dense,
        }

    return read


def _granite(keys: _OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    # llama.cpp reads this key of Granite as whether heads rotate.
    if not keys.flag("rope.scaling.finetuned", True):
        raise keys.error("rope.scaling.finetuned", "true")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    # As in llama.cpp: an absent factor or a factor of 0 is the usual one.
    return {
        "architectures": ["GraniteForCausalLM"],
        "mlp_bias": keys.has("blk.0.ffn_gate.bias"),
        "attention_multiplier": keys.values.get("attention.scale") or head_dim**-0.5,
        "embedding_multiplier": keys.values.get("embedding_scale") or 1.0,
        "residual_multiplier": keys.values.get("residual_scale") or 1.0,
        # A divisor despite its name.
        "logits_scaling": keys.values.get("logit_scale") or 1.0,
    }


def _granitemoe(keys: _OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.has("blk.0.ffn_gate_shexp.weight"):
        raise StartupError(f"{keys.source}: a shared expert is not supported")
    return {
        **_granite(keys, config),
        "architectures": ["GraniteMoeForCausalLM"],
        "num_local_experts": keys.values.get("expert_count"),
        "num_experts_per_tok": keys.values.get("expert_used_count"),
    }


def _glm4moe(keys: _OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.values.get("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise keys.error("expert_gating_func", f"{_SIGMOID} (sigmoids)")
    # The layers that predict further tokens are counted among the blocks.
    num_extra = keys.integer("nextn_predict_layers", MAX_LAYERS, 0, low=0)
    return {
        "architectures": ["Glm4MoeForCausalLM"],
        "head_dim": keys.integer("attention.key_length", MAX_HEAD_DIM),
        "num_hidden_layers": config["num_hidden_layers"] - num_extra,
        "num_nextn_predict_layers": num_extra,
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        "n_routed_experts": keys.values.get("expert_count"),
        "n_shared_experts": keys.values.get("expert_shared_count"),
        "num_experts_per_tok": keys.values.get("expert_used_count"),
        "moe_intermediate_size": keys.values.get("expert_feed_forward_length"),
        "first_k_dense_replace": keys.values.get("leading_dense_block_count"),
        "n_group": keys.values.get("expert_group_count"),
        "topk_group": keys.values.get("expert_group_used_count"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "routed_scaling_factor": keys.values.get("expert_weights_scale") or 1.0,
    }


def _smollm3(keys: _OwnKeys, config: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001  # as others
    # The files do not name the layers without positions; in llama.cpp, every fourth is one.
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "mlp_bias": keys.has("blk.0.ffn_gate.bias"),
        "no_rope_layer_interval": 4,
    }


def _gemma(keys: _OwnKeys, config: dict[str, Any], num_layers_of_largest: int) -> dict[str, Any]:
    """Return the keys that Gemma 2 and Gemma 3 share."""
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    # As in llama.cpp: only the largest model does not scale by its head size.
    is_largest = layers == num_layers_of_largest
    scalar = hidden // config["num_attention_heads"] if is_largest else config.get("head_dim", 256)
    found: dict[str, Any] = {"query_pre_attn_scalar": scalar}
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if keys.values.get(name):
            found[name] = keys.values[name]
    if keys.values.get("attention.sliding_window"):
        found["sliding_window"] = keys.values["attention.sliding_window"]
    return found


def _gemma2(keys: _OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Gemma2ForCausalLM"], **_gemma(keys, config, 46)}


def _gemma3(keys: _OwnKeys, config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "architectures": ["Gemma3ForCausalLM"],
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 1.0, 1e12, 10000.0),
        "rope_theta": keys.number("rope.freq_base", 1.0, 1e12, 1e6),
        **_gemma(keys, config, 62),
    }
    pattern = keys.values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        found["layer_types"] = [
            "sliding_attention" if windowed else "full_attention" for windowed in pattern
        ]
    elif pattern is not None and not isinstance(pattern, bool):
        found["sliding_window_pattern"] = pattern
    return found


# llama.cpp's names: a Mistral is a "llama" there, and a Mixtral is a "llama" with experts.
_ARCHITECTURES: dict[str, Callable[[_OwnKeys, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _plain("Qwen2ForCausalLM"),
    "qwen3": _plain("Qwen3ForCausalLM"),
    "qwen2moe": _moe("Qwen2MoeForCausalLM", sums_to_one=False),
    "qwen3moe": _moe("Qwen3MoeForCausalLM", sums_to_one=True),
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4moe": _glm4moe,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "smollm3": _smollm3,
}
assert set(_FLOAT_DTYPES) == set(FLOAT_TYPES)
