"""Tiny checkpoints with weights quantized to 4 or 8 bits, in the layouts of known tools.

Numbers are packed into words one by one, as in the tools' own code: AutoGPTQ's `QuantLinear.pack`,
AutoAWQ's `WQLinear_GEMM.from_linear`, compressed-tensors' `pack_to_int32`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.fp8_models import is_linear


@dataclass(frozen=True)
class Layout:
    """The layout of a quantization tool's checkpoints.

    Attributes:
        tool: `gptq`, `awq` or `packed` (compressed-tensors).
        bits: number of bits of a code.
        group: number of columns that share a scale; 0 for all columns.
        symmetric: whether zero is the middle code.
        order: whether columns are grouped in the order of their importance.
        words: the tool's entry in the configuration.
    """

    tool: str
    bits: int
    group: int
    symmetric: bool
    order: bool = False
    words: dict[str, Any] = field(default_factory=dict)


def _gptq(bits: int, group: int, symmetric: bool, order: bool = False, **more: Any) -> Layout:
    words = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": symmetric,
             "desc_act": order, "lm_head": False, **more}  # fmt: skip
    return Layout("gptq", bits, group, symmetric, order, words)


def _awq(group: int) -> Layout:
    words = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True,
             "version": "gemm", "modules_to_not_convert": None}  # fmt: skip
    return Layout("awq", 4, group, False, False, words)


def _packed(bits: int, group: int, symmetric: bool, order: bool = False) -> Layout:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
        "strategy": "group" if group else "channel", "group_size": group or None,
        "actorder": "group" if order else None,
    }  # fmt: skip
    words = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None,
                        "output_activations": None}
        },
        "ignore": ["lm_head"],
    }  # fmt: skip
    return Layout("packed", bits, group, symmetric, order, words)


LAYOUTS = {
    "gptq_32": _gptq(4, 32, True),
    "gptq_zeros": _gptq(4, 64, False),
    "gptq_v2_zeros": _gptq(4, 32, False, checkpoint_format="gptq_v2"),
    "gptq_whole": _gptq(4, 0, True),
    "gptq_order": _gptq(4, 32, False, True),
    "gptq_8_bits": _gptq(8, 64, True),
    "awq": _awq(32),
    "packed": _packed(4, 32, True),
    "packed_zeros": _packed(4, 64, False),
    "packed_channel": _packed(4, 0, True),
    "packed_order": _packed(4, 32, True, True),
    "packed_8_bits": _packed(8, 64, False),
}


@dataclass(frozen=True)
class Codes:
    """A quantized matrix.

    Attributes:
        codes: `[rows, columns]`.
        scales: `[rows, groups]`.
        zeros: `[rows, groups]`, the code of zero.
        places: `[columns]`, the group of each column.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    places: np.ndarray

    def values(self) -> Tensor:
        """Return the values that the codes represent."""
        found = np.empty(self.codes.shape, np.float32)
        for column, group in enumerate(self.places):
            difference = self.codes[:, column].astype(np.int64) - self.zeros[:, group]
            found[:, column] = difference * self.scales[:, group].astype(np.float32)
        return torch.from_numpy(found)


def quantized(matrix: Tensor, layout: Layout, dtype: Any = np.float16) -> Codes:
    """Quantize a matrix: round to the nearest code in each group of columns."""
    numbers = matrix.float().numpy()
    rows, columns = numbers.shape
    group, most = layout.group or columns, 2**layout.bits - 1
    count = -(-columns // group)
    places = np.arange(columns) // group
    if layout.order:
        # As in GPTQ with act order: the i-th most important column belongs to group i // group.
        importance = np.argsort(-np.abs(numbers).sum(0), kind="stable")
        places[importance] = np.arange(columns) // group
    codes = np.empty((rows, columns), np.int64)
    scales, zeros = np.empty((rows, count), dtype), np.empty((rows, count), np.int64)
    for g in range(count):
        part = numbers[:, places == g]
        if layout.symmetric:
            scale = (2 * np.abs(part).max(1) / most).astype(dtype)
            zero = np.full(rows, (most + 1) // 2)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = ((high - low) / most).astype(dtype)
            zero = np.rint(-low / scale.astype(np.float32)).clip(0, most)
        scales[:, g], zeros[:, g] = scale, zero
        scaled = part / scale.astype(np.float32)[:, None] + zero[:, None]
        codes[:, places == g] = np.rint(scaled).clip(0, most)
    return Codes(codes, scales, zeros, places)


def _int32(words: np.ndarray) -> Tensor:
    return torch.from_numpy(words.astype(np.uint32).view(np.int32).copy())


def _pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """Pack the codes of consecutive rows into words."""
    of_word = 32 // bits
    words = np.zeros((-(-len(codes) // of_word), codes.shape[1]), np.uint64)
    for row, numbers in enumerate(codes):
        words[row // of_word] |= numbers.astype(np.uint64) << np.uint64(bits * (row % of_word))
    return words


def _awq_words(codes: np.ndarray) -> np.ndarray:
    """Pack the codes of eight consecutive columns into words, in AWQ's order."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint64)
    for column in range(words.shape[1]):
        for place, which in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            words[:, column] |= codes[:, 8 * column + which].astype(np.uint64) << np.uint64(
                4 * place
            )
    return words


def stored(found: Codes, layout: Layout) -> dict[str, Tensor]:
    """Return the tensors that the tool stores for a matrix, by the end of their names."""
    bits = layout.bits
    scales = torch.from_numpy(found.scales.copy())
    places = torch.from_numpy(found.places.astype(np.int32))
    if layout.tool == "awq":
        return {
            "qweight": _int32(_awq_words(found.codes.T)),
            "qzeros": _int32(_awq_words(found.zeros.T)),
            "scales": scales.t(),
        }
    if layout.tool == "gptq":
        is_first = layout.words.get("checkpoint_format") != "gptq_v2"
        zeros = (found.zeros - is_first) & (2**bits - 1)
        return {
            "qweight": _int32(_pack_rows(found.codes.T, bits)),
            "qzeros": _int32(_pack_rows(zeros, bits).T),
            "scales": scales.t(),
            "g_idx": places,
        }
    tensors = {
        "weight_packed": _int32(_pack_rows(found.codes.T, bits).T),
        "weight_scale": scales,
        "weight_shape": torch.tensor(found.codes.shape),
    }
    if not layout.symmetric:
        tensors["weight_zero_point"] = _int32(_pack_rows(found.zeros, bits))
    if layout.order:
        tensors["weight_g_idx"] = places
    return tensors


def write_codes(
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
    values, tensors = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not is_linear(name, tuple(tensor.shape)) or any(part in name for part in kept):
            tensors[name] = values[name] = tensor
            continue
        found = quantized(tensor, layout)
        values[name] = found.values()
        stem = name.removesuffix("weight")
        tensors |= {stem + key: each.contiguous() for key, each in stored(found, layout).items()}
    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    words = {**json.loads(path.read_text()), "quantization_config": layout.words}
    path.write_text(json.dumps(words))
    return values
