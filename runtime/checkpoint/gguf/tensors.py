"""Gives the tensors of a GGUF file the names and the order of a Hugging Face checkpoint. No torch.

llama.cpp renames every tensor, stacks experts, interleaves the halves of rotated heads (Llama,
Granite, SmolLM3) and adds one to the norms of Gemma and Qwen3-Next. This module undoes these
changes or describes them, so that other code does not depend on them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from runtime.checkpoint.gguf.files import open_gguf
from runtime.checkpoint.gguf.header import GgufArray, GgufFile, GgufTensor
from runtime.checkpoint.gguf.linear_attention import in_flat_rows
from runtime.checkpoint.gguf.own_keys import architecture_of
from runtime.checkpoint.tensor_info import TensorInfo
from runtime.errors import StartupError

_BLOCK = re.compile(r"blk\.(\d{1,5})\.(?:(.+)\.(weight|bias|scale)|(ssm_[ad]))")
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    # LFM2's last norm.
    "token_embd_norm": "model.embedding_norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_MINIMAX_M2 = {
    **_MIXTRAL,
    "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
}
_PHI3 = {
    "attn_qkv": "self_attn.qkv_proj",
    # Gate and up together.
    "ffn_up": "mlp.gate_up_proj",
}
_STARCODER2 = {
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.{}.up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.{}.down_proj",
}
_GLM4_MOE = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_DEEPSEEK = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    # This tensor has the rows of gate and up together.
    "ffn_up": "mlp.gate_up_proj",
}
_OLMO2 = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_GEMMA,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.{}.gate_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    # These GGUF names include their ending, because the checkpoint's names have none.
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_DELTA_NET = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    # In `ssm_in` and `ssm_ba`, the rows of a key head are adjacent, as in the checkpoint.
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
}
_GRANITE_HYBRID = {
    **_GRANITE_MOE,
    **_MAMBA,
    "ffn_gate": "shared_mlp.gate_proj",
    "ffn_up": "shared_mlp.up_proj",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_NEMOTRON_H = {
    "attn_norm": "norm",
    **{part: name.replace("mamba.", "mixer.") for part, name in _MAMBA.items()},
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_NEMOTRON_H_TOP = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
}
# Tensors of a layer whose names have no `weight` or `bias` at the end.
_WHOLE_NAMES = {
    "attn_sinks": "self_attn.sinks",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
# Tensors with a matrix for each head, which become one matrix with the heads' rows in order.
_OF_HEADS = frozenset({"attn_k_b", "attn_v_b"})
# Depthwise convolutions. The checkpoint has a dimension of size 1 for a channel's only input.
_CONVOLUTIONS = frozenset({"shortconv.conv", "ssm_conv1d"})
# Vectors that Mamba's files store as matrices.
_VECTORS = frozenset({"ssm_a", "ssm_d", "ssm_norm"})
# Tensors that are part of the configuration, not weights.
_SUPERFLUOUS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)


@dataclass(frozen=True)
class _Dialect:
    """How the files of an architecture differ from the usual ones.

    Attributes:
        names: names of a layer's tensors, where they differ from `_LAYER`.
        heads: tensors whose heads have interleaved halves, with the metadata key of the number of
            heads.
        norm_offset: the number that was added to the weights of norms, except those of linear
            attention.
        top: names of the tensors outside of layers, where they differ from `_TOP`.
        layers: what the names of all layers begin with.
        has_tiled_heads: whether the value heads of linear attention are in another order; see
            `runtime.checkpoint.gguf.linear_attention`.
    """

    names: dict[str, str] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    top: dict[str, str] = field(default_factory=lambda: _TOP)
    layers: str = "model.layers"
    has_tiled_heads: bool = False


_LLAMA_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}


_DIALECTS = {
    "deepseek2": _Dialect(_DEEPSEEK),
    "gemma2": _Dialect(_GEMMA, norm_offset=1.0),
    "gemma3": _Dialect(_GEMMA, norm_offset=1.0),
    "gemma4": _Dialect(_GEMMA4),
    "glm4": _Dialect(_GLM4),
    "glm4moe": _Dialect(_GLM4_MOE),
    "gpt-oss": _Dialect(_GPT_OSS),
    "granite": _Dialect(heads=_LLAMA_HEADS),
    "granitemoe": _Dialect(_GRANITE_MOE, _LLAMA_HEADS),
    "granitehybrid": _Dialect(_GRANITE_HYBRID, _LLAMA_HEADS),
    "lfm2": _Dialect(_LFM2),
    "llama": _Dialect(heads=_LLAMA_HEADS),
    "minimax-m2": _Dialect(_MINIMAX_M2),
    "mistral3": _Dialect(heads=_LLAMA_HEADS),
    "nemotron_h": _Dialect(
        _NEMOTRON_H, _LLAMA_HEADS, top=_NEMOTRON_H_TOP, layers="backbone.layers"
    ),
    "olmo2": _Dialect(_OLMO2),
    "phi3": _Dialect(_PHI3),
    "qwen35": _Dialect(_DELTA_NET, norm_offset=1.0, has_tiled_heads=True),
    "qwen35moe": _Dialect(_DELTA_NET, norm_offset=1.0, has_tiled_heads=True),
    "qwen3next": _Dialect(_DELTA_NET, norm_offset=1.0),
    "smollm3": _Dialect(heads=_LLAMA_HEADS),
    "starcoder2": _Dialect(_STARCODER2),
}


def _dialect(file: GgufFile) -> _Dialect:
    name = architecture_of(file)
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _Dialect(_MIXTRAL, _LLAMA_HEADS)
    return _DIALECTS.get(name, _Dialect())


def gguf_tensor_infos(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a GGUF model, by their names in a Hugging Face checkpoint.

    A tensor with an unknown name keeps that name, and is reported as unexpected later.

    Raises:
        StartupError: the file cannot be read, or a number of heads does not fit its tensor; the
            message has one line.
    """
    file = open_gguf(path)
    dialect = _dialect(file)
    found: dict[str, TensorInfo] = {}
    for tensor in file.tensors:
        if tensor.name in _SUPERFLUOUS:
            continue
        for info in _infos(file, dialect, tensor):
            if info.name in found:
                raise StartupError(f"{tensor.file}: two tensors are {info.name!r}")
            found[info.name] = info
    return found


def _infos(file: GgufFile, dialect: _Dialect, tensor: GgufTensor) -> list[TensorInfo]:
    stem, _, kind = tensor.name.rpartition(".")
    match = _BLOCK.fullmatch(tensor.name)
    part = (match[2] or match[4]) if match else ""
    name = _name(dialect, tensor.name)
    shape = _shape(part, tensor.shape)
    has_offset = stem.endswith("norm") and part != "ssm_norm" and kind == "weight"
    if "{}" not in name:
        info = TensorInfo(
            name, tensor.type.name, shape, tensor.file, tensor.start,
            tensor.start + tensor.size_bytes,
            interleaved_heads=(
                _num_heads(file, dialect.heads[part], shape) if part in dialect.heads else 0
            ),
            offset=dialect.norm_offset if has_offset else 0.0,
            is_decay=part == "ssm_a",
        )  # fmt: skip
        if dialect.names is _DELTA_NET:
            return in_flat_rows(file, part, info, is_tiled=dialect.has_tiled_heads)
        return [info]
    # Experts are stacked, so each expert's tensor is a contiguous range of bytes.
    if len(shape) != (2 if kind == "bias" else 3):
        raise StartupError(
            f"{tensor.file}: {tensor.name!r} is {list(shape)}, not a stack of experts"
        )
    size, rows = tensor.size_bytes // shape[0], shape[1]
    starts = [tensor.start + index * size for index in range(shape[0])]
    names = [name]
    if part == "ffn_gate_up_exps":
        # An expert's rows of gate come before those of up.
        names, rows, size = [name, name.replace(".gate_proj.", ".up_proj.")], rows // 2, size // 2
    return [
        TensorInfo(
            each.format(index),
            tensor.type.name,
            (rows, *shape[2:]),
            tensor.file,
            start + place * size,
            start + (place + 1) * size,
        )
        for index, start in enumerate(starts)
        for place, each in enumerate(names)
    ]


def _name(dialect: _Dialect, full: str) -> str:
    """Return a GGUF tensor's name in a checkpoint, with `{}` for the index of an expert."""
    stem, _, kind = full.rpartition(".")
    if stem in dialect.top:
        return f"{dialect.top[stem]}.{kind}"
    match = _BLOCK.fullmatch(full)
    if match is None:
        return full
    part = match[2] or match[4]
    layer = f"{dialect.layers}.{match[1]}"
    whole = full.split(".", 2)[2]
    if whole in dialect.names:
        return f"{layer}.{dialect.names[whole]}"
    if part in _WHOLE_NAMES:
        return f"{layer}.{dialect.names.get(part, _WHOLE_NAMES[part])}"
    # Tensors of layers that predict further tokens (MTP) keep their names; families ignore them.
    extra = part if part.startswith("nextn.") else None
    known = {**_LAYER, **dialect.names}.get(part, extra)
    return full if known is None else f"{layer}.{known}.{kind}"


def _shape(part: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a tensor has in a checkpoint."""
    if part == "ffn_gate_inp_shexp" and len(shape) == 1:
        return (1, *shape)
    if part in _CONVOLUTIONS and len(shape) == 2:
        return (shape[0], 1, shape[1])
    if part in _VECTORS:
        return (math.prod(shape),)
    if part in _OF_HEADS and len(shape) == 3:
        return (shape[0] * shape[1], shape[2])
    return shape


def _num_heads(file: GgufFile, key: str, shape: tuple[int, ...]) -> int:
    name = architecture_of(file)
    count = file.metadata.get(f"{name}.{key}", file.metadata.get(f"{name}.attention.head_count"))
    if isinstance(count, GgufArray) and not count.is_text:
        # Layers without attention have 0 heads here.
        count = next((each for each in count.numbers() if each), 0)
    if not isinstance(count, int) or count < 1 or shape[0] % (2 * count):
        raise StartupError(f"{file.path}: {shape[0]} rows are not {count!r} heads of halves")
    return count
