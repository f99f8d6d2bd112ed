"""Build a model and fill it: from safetensors, or with seeded random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoint.check import check_model_folder
from runtime.checkpoint.model_config import ModelConfig
from runtime.checkpoint.weights import decoder_weights
from runtime.models.causal_lm import CausalLM
from runtime.models.layers.build_context import BuildContext
from runtime.models.registry import MODELS
from runtime.weights.fill import load_weights, slots_of
from runtime.weights.read_tensors import checkpoint_tensors

_DUMMY_STD = 0.02


def load_model(
    folder: Path,
    config: ModelConfig,
    context: BuildContext,
    progress: Callable[[float], None],
    *,
    load_format: str = "auto",
    seed: int = 0,
) -> CausalLM:
    """Build the model that `config` names and load its weights.

    Args:
        folder: local, with the safetensors; not read for dummy weights.
        config: what `load_model_config` returned.
        context: type, device and rank.
        progress: called with the share of bytes that are loaded, from 0 to 1.
        load_format: `auto` or `safetensors` for the folder's weights, `dummy` for random ones.
        seed: of dummy weights.

    Raises:
        StartupError: the folder's weights cannot be read or do not fit; one line.
    """
    progress(0.0)
    if load_format == "dummy":
        model = build_model(config, context)
        total = sum(torch.Size(spec.shape).numel() for spec in decoder_weights(config))
        tensors = dummy_tensors(config, seed, context.device)
        load_weights(model, _counted(tensors, total, lambda _, tensor: tensor.numel(), progress))
    else:
        summary = check_model_folder(folder, config)
        model = build_model(config, context)
        infos = summary.tensors
        tensors = checkpoint_tensors(summary, context.device, slots_of(model))
        # Of whole tensors, of which a rank may take a part.
        counted = _counted(
            tensors, summary.total_bytes, lambda name, _: infos[name].size_bytes, progress
        )
        load_weights(model, counted)
    progress(1.0)
    return model


def build_model(config: ModelConfig, context: BuildContext) -> CausalLM:
    """Build the layers of the model that `config` names, without weights.

    Raises:
        InvalidRequest: no such architecture in `runtime.models.registry`.
    """
    return MODELS.load(config.architecture)(config, context)


def dummy_tensors(
    config: ModelConfig, seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield random float32 weights of the right shapes, the same for one seed and kind of device.

    They are made on `device`: a CPU would need a minute for what a GPU makes in a second.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for spec in decoder_weights(config):
        if spec.kind == "norm":
            yield spec.name, torch.ones(spec.shape, device=device)
        elif spec.kind == "bias":
            yield spec.name, torch.zeros(spec.shape, device=device)
        else:
            tensor = torch.empty(spec.shape, device=device)
            yield spec.name, tensor.normal_(0.0, _DUMMY_STD, generator=generator)


def parameter_bytes(model: CausalLM) -> int:
    """Return the bytes that the model's weights hold, packed, on this rank."""
    return sum(holder.size_bytes for _, holder in model.holders())


def _counted(
    tensors: Iterator[tuple[str, Tensor]],
    total: int,
    size_of: Callable[[str, Tensor], int],
    progress: Callable[[float], None],
) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors through; report the share that has been taken in."""
    done = 0
    for name, tensor in tensors:
        yield name, tensor
        done += size_of(name, tensor)
        progress(done / total)
