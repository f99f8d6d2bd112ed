"""Writes tiny 8-bit checkpoints (fp8 or int8) in the layouts of known quantization tools."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn


def _compressed(
    weights: dict[str, Any], activations: dict[str, Any] | None, kind: str = "float"
) -> dict[str, Any]:
    common = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, **weights},
        "input_activations": None if activations is None else {**common, **activations},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*shared_expert_gate$"],
        "kv_cache_scheme": None,
    }


@dataclass(frozen=True)
class Layout:
    """The layout of a quantization tool's checkpoints.

    Attributes:
        block: number of rows and of columns that share a scale; 0 for all.
        words: the tool's entry in the configuration.
        scale: end of the scales' names.
        scale_shape: shape in which a single scale is stored, such as `()`; `None` for the shape of
            all scales.
        activations: how activations are rounded: `static`, `token`, `group` or `none`.
        file: name of the tool's configuration file; empty for config.json.
        codes: number type of the quantized weights.
        input_scale: how the names of the activations' scales end.
    """

    block: tuple[int, int]
    words: dict[str, Any]
    activations: str
    scale: str = "weight_scale"
    scale_shape: tuple[int, ...] | None = None
    file: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    codes: torch.dtype = FP8
    input_scale: str = "input_scale"


_DYNAMIC = {"dynamic": True, "strategy": "token"}
LAYOUTS = {
    "compressed_tensor_static": Layout(
        (0, 0),
        _compressed({"strategy": "tensor"}, {"dynamic": False, "strategy": "tensor"}),
        "static",
        scale_shape=(1,),
    ),
    "compressed_channel_dynamic": Layout(
        (1, 0), _compressed({"strategy": "channel"}, _DYNAMIC), "token"
    ),
    "compressed_tensor_dynamic": Layout(
        (0, 0), _compressed({"strategy": "tensor"}, _DYNAMIC), "token", scale_shape=(1,)
    ),
    "compressed_weights_only": Layout(
        (1, 0), _compressed({"strategy": "channel"}, None), "none"
    ),
    "int8_channel_dynamic": Layout(
        (1, 0), _compressed({"strategy": "channel"}, _DYNAMIC, "int"), "token", codes=torch.int8
    ),
    "int8_tensor_static": Layout(
        (0, 0),
        _compressed(
            {"strategy": "tensor"}, {"dynamic": False, "strategy": "tensor"}, "int"
        ),
        "static",
        scale_shape=(1,),
        codes=torch.int8,
    ),
    "int8_weights_only": Layout(
        (1, 0), _compressed({"strategy": "channel"}, None, "int"), "none", codes=torch.int8
    ),
    "compressed_block": Layout(
        (128, 128),
        _compressed(
            {"strategy": "block", "block_structure": [128, 128]},
            {"dynamic": True, "strategy": "group", "group_size": 128},
        ),
        "group",
    ),
    "autofp8_static": Layout(
        (0, 0),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "static",
        scale_shape=(),
    ),
    "autofp8_dynamic": Layout(
        (0, 0),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
        "token",
        scale_shape=(1,),
    ),
    # Ministral 3 as published.
    "transformers_static": Layout(
        (0, 0),
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None,
         "dequantize": False, "modules_to_not_convert": ["lm_head"]},
        "static",
        scale="weight_scale_inv",
        scale_shape=(),
        input_scale="activation_scale",
    ),
    "modelopt": Layout(
        (0, 0),
        {
            "producer": {"name": "modelopt", "version": "0.29.0"},
            "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None,
                             "exclude_modules": ["lm_head"]},
        },
        "static",
        scale_shape=(),
        file="hf_quant_config.json",
    ),
    "block": Layout(
        (128, 128),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
         "weight_block_size": [128, 128]},
        "group",
        scale="weight_scale_inv",
    ),
}  # fmt: skip


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Whether tools quantize the weight of this name and shape."""
    return (len(shape) == 2 and name.endswith("_proj.weight")) or (
        ".experts." in name and name.endswith(".weight")
    )


def nearest(quotients: Tensor, codes: torch.dtype) -> Tensor:
    """Return the nearest representable numbers to `quotients`, values divided by their scale."""
    if codes is torch.int8:
        return quotients.round().clamp(-127, 127).to(codes)
    return quotients.clamp(-448, 448).to(codes)


def to_codes(
    matrix: Tensor, block: tuple[int, int], dtype: torch.dtype = FP8
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a quantized matrix, the scales of its blocks, and the values that they represent."""
    most = 127 if dtype is torch.int8 else 448
    rows, columns = matrix.shape
    high, wide = block[0] or rows, block[1] or columns
    codes, values = torch.empty(rows, columns, dtype=dtype), torch.empty(rows, columns)
    scales = torch.empty(-(-rows // high), -(-columns // wide))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            place = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scale = matrix[place].abs().max() / most
            scales[i, j] = scale
            codes[place] = nearest(matrix[place] / scale, dtype)
            values[place] = codes[place].float() * scale
    return codes, scales, values


def static_scale(name: str, codes: torch.dtype) -> float:
    """Return the activation scale of a module, different for each module."""
    scale = 0.02 + 0.001 * (sum(map(ord, name)) % 7)
    return 2 * scale if codes is torch.int8 else scale


def write_fp8(
    source: Path, folder: Path, layout: Layout, kept: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Write the model in `source` to `folder`, quantized as by a tool.

    Args:
        source: folder of a tiny model.
        folder: the folder to create.
        layout: layout of the tool.
        kept: parts of the names of matrices that are not quantized.

    Returns:
        The values that the stored weights represent, by name.
    """
    shutil.copytree(source, folder)
    tensors, values = load_file(source / "model.safetensors"), {}
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not is_linear(name, tuple(tensor.shape)) or any(part in name for part in kept):
            stored[name] = values[name] = tensor
            continue
        stem = name.removesuffix("weight")
        codes, scales, values[name] = to_codes(tensor.float(), layout.block, layout.codes)
        if layout.scale_shape is not None:
            scales = scales.view(layout.scale_shape)
        stored |= {name: codes, stem + layout.scale: scales}
        if layout.activations == "static":
            scale = torch.tensor(static_scale(stem.removesuffix("."), layout.codes))
            stored[stem + layout.input_scale] = scale.view(layout.scale_shape or ())
    save_file(
        {name: each.contiguous() for name, each in stored.items()}, folder / "model.safetensors"
    )
    words = dict(layout.words)
    if layout.file:
        (folder / layout.file).write_text(json.dumps(words))
        return values
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if kept:
        key = next(each for each in ("ignore", "ignored_layers", "modules_to_not_convert")
                   if each in words or each == "modules_to_not_convert")  # fmt: skip
        words[key] = [*words.get(key, []), *(f"re:.*{part}.*" for part in kept)]
    path.write_text(json.dumps({**config, "quantization_config": words}))
    return values


def round_as(layout: Layout, module: str, x: Tensor) -> Tensor:
    """Round activations as a module of the layout does, by token and group."""
    if layout.activations == "none":
        return x
    flat = x.reshape(-1, x.shape[-1])
    width = layout.block[1] if layout.activations == "group" else flat.shape[1]
    out = torch.empty_like(flat)
    for row, to in zip(flat, out, strict=True):
        for first in range(0, len(row), width):
            part = row[first : first + width]
            scale = part.abs().max() / (127 if layout.codes is torch.int8 else 448)
            if layout.activations == "static":
                scale = torch.tensor(static_scale(module, layout.codes))
            to[first : first + width] = nearest(part / scale, layout.codes).float() * scale
    return out.view(x.shape)
