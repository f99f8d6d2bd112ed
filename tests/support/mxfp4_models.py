"""Tiny gpt-oss checkpoints with experts in MXFP4, in the layout of OpenAI's weights.

A block has 32 numbers of a row: a common exponent, and two 4-bit codes per byte, the first code in
the lower bits. Numbers are packed one by one.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def packed(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return blocks, scales and represented values of a matrix `[rows, columns]`."""
    rows, columns = matrix.shape
    blocks = np.zeros((rows, columns // 32, 16), np.uint8)
    scales = np.zeros((rows, columns // 32), np.uint8)
    numbers = np.empty((rows, columns), np.float32)
    for row in range(rows):
        for group in range(columns // 32):
            part = matrix[row, 32 * group : 32 * group + 32]
            exponent = math.floor(math.log2(np.abs(part).max())) - 2
            codes = np.abs(_VALUES[None, :] - (part / 2.0**exponent)[:, None]).argmin(1)
            for place, code in enumerate(codes.tolist()):
                blocks[row, group, place // 2] |= code << (4 * (place % 2))
            scales[row, group] = exponent + 127
            numbers[row, 32 * group : 32 * group + 32] = _VALUES[codes] * 2.0**exponent
    return blocks, scales, numbers


def stored(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks, scales and represented values of all experts' tensor, `[experts, in, out]`."""
    made = [packed(each.numpy()) for each in tensor.float().transpose(1, 2)]
    blocks, scales, numbers = (torch.from_numpy(np.stack(each)) for each in zip(*made, strict=True))
    return blocks, scales, numbers.transpose(1, 2).contiguous()


def write_mxfp4(source: Path, folder: Path, kept: str = "none") -> dict[str, Tensor]:
    """Write the model in `source` to `folder` with its experts in MXFP4.

    Args:
        source: folder of a tiny model.
        folder: the folder to create.
        kept: part of the names of tensors that are not quantized.

    Returns:
        The values that the stored weights represent, by name.
    """
    shutil.copytree(source, folder)
    values: dict[str, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")) or kept in name:
            tensors[name] = values[name] = tensor
            continue
        blocks, scales, values[name] = stored(tensor)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    words = {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": words}))
    return values
