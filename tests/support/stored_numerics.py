"""Tiny models with rows as long as quantization blocks, and their results in `transformers`."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from runtime.checkpoint.headers import SINGLE_FILE as SINGLE
from tests.support.tiny_families import TINY_FAMILIES, tiny_family
from tests.support.tiny_models import (
    ENDOFTEXT_ID,
    TINY_HYBRIDS,
    TINY_MODELS,
    VOCAB_SIZE,
    TinyModel,
    tiny_model,
)

# Quantization blocks of 256 numbers need rows of at least this length.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}


def variant(name: str, options: dict[str, object]) -> Path:
    """Return the folder of a tiny model or family, with options that replace those of its table."""
    if name in TINY_FAMILIES and not options:
        return tiny_family(name)
    model = {**TINY_FAMILIES, **TINY_MODELS, **TINY_HYBRIDS}[name]
    key = f"{name} {sorted(options.items())}"
    if options and key not in TINY_MODELS:
        changed = {"pad_token_id": ENDOFTEXT_ID, **model.options, **options}
        TINY_MODELS[key] = TinyModel(model.architecture, changed)
        try:
            return tiny_model(key)
        finally:
            del TINY_MODELS[key]
    return tiny_model(name)


def reference(folder: Path, weights: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Return the logits of `transformers` for the folder's model with other weights."""
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as other:
        shutil.copy(folder / "config.json", other)
        save_file({name: each.contiguous() for name, each in weights.items()}, f"{other}/{SINGLE}")
        model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def prompt(length: int = 40) -> list[int]:
    source = random.Random(length)
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


def divergence(expected: Tensor, found: Tensor) -> float:
    """Return the mean Kullback-Leibler divergence of the distributions at all positions."""
    first, second = (each.log_softmax(dim=-1) for each in (expected, found))
    return float((first.exp() * (first - second)).sum(dim=-1).mean())
