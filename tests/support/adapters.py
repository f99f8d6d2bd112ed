"""LoRA adapters as PEFT writes them, and the same weights merged into a `transformers` model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def adapter_tensors(
    model_folder: Path, modules: Iterable[str], rank: int, seed: int, size: float = 0.5
) -> dict[str, Tensor]:
    """Return random LoRA matrices for all weights of the named modules, by PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in base_weights(model_folder).items():
        module = name.removesuffix(".weight")
        if weight.dim() != 2 or module.rpartition(".")[2] not in set(modules):
            continue
        rows, columns = weight.shape
        a = torch.randn(rank, columns, generator=generator) * size / math.sqrt(columns)
        b = torch.randn(rows, rank, generator=generator) * size / math.sqrt(rank)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    assert tensors
    return tensors


def write_adapter(
    folder: Path,
    tensors: Mapping[str, Tensor],
    rank: int,
    modules: Iterable[str],
    alpha: float = 16.0,
    **config: Any,
) -> Path:
    """Write an adapter's folder as PEFT's `save_pretrained` does."""
    folder.mkdir(parents=True)
    keys = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(modules),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    save_file(
        {name: each.contiguous() for name, each in tensors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def make_adapter(
    folder: Path,
    model_folder: Path,
    rank: int,
    seed: int,
    modules: Iterable[str] = (*ATTENTION, *MLP),
    **config: Any,
) -> Path:
    """Write the folder of a random adapter for a model."""
    kinds = list(modules)
    tensors = adapter_tensors(model_folder, kinds, rank, seed)
    return write_adapter(folder, tensors, rank, kinds, **config)


def base_weights(model_folder: Path) -> dict[str, Tensor]:
    """Return all tensors in a model's folder by name."""
    found: dict[str, Tensor] = {}
    for path in sorted(model_folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def merged_model(model_folder: Path, adapter_folder: Path | None) -> Any:
    """Return the float32 `transformers` model with the adapter added to its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    if adapter_folder is None:
        return model
    config = json.loads((adapter_folder / "adapter_config.json").read_text())
    tensors = load_file(adapter_folder / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for name, a in tensors.items():
        if ".lora_A" not in name:
            continue
        b = tensors[name.replace(".lora_A", ".lora_B")]
        module = name.removeprefix("base_model.model.").partition(".lora_A")[0]
        rank = len(a)
        alpha = config["lora_alpha"]
        for key, value in config["alpha_pattern"].items():
            if module.endswith(key):
                alpha = value
        scale = alpha / (math.sqrt(rank) if config["use_rslora"] else rank)
        modules[module].weight.data += (b.double() @ a.double() * scale).float()
    return model
