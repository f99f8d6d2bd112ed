"""Builds a model and fills it, from safetensors or GGUF files or with random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from runtime.checkpoint.check import check_model_folder
from runtime.checkpoint.model_spec import ModelSpec, WeightSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.model import Model
from runtime.models.quantization.registry import device_method
from runtime.models.registry import model_class
from runtime.weights.fill import is_elsewhere, load_weights, shards_of
from runtime.weights.read_tensors import checkpoint_tensors

_DUMMY_STD = 0.02


def load_model(
    folder: Path,
    spec: ModelSpec,
    context: BuildContext,
    progress: Callable[[float], None],
    *,
    load_format: str = "auto",
    seed: int = 0,
) -> Model:
    """Build the model that `spec` describes, and load its weights.

    Args:
        folder: local folder with the weights; not read for dummy weights.
        spec: the model's description, from `read_model_spec`.
        context: type of the weights, device and rank.
        progress: called with the share of the bytes that is loaded, from 0 to 1.
        load_format: `auto` or `safetensors` for the folder's weights, `dummy` for random ones.
        seed: determines dummy weights.

    Raises:
        StartupError: the folder's weights cannot be read or do not fit; the message has one line.
    """
    progress(0.0)
    if load_format == "dummy":
        model = build_model(spec, context)
        total = spec.num_parameters
        tensors = dummy_tensors(spec, seed, context.device)
        load_weights(model, _counted(tensors, total, lambda _, tensor: tensor.numel(), progress))
    else:
        summary = check_model_folder(folder, spec)
        model = build_model(spec, context)
        skips = is_elsewhere(model)
        infos = {name: info for name, info in summary.tensors.items() if not skips(name)}
        own_bytes = sum(info.size_bytes for info in infos.values())
        own = replace(summary, tensors=infos, total_bytes=own_bytes)
        tensors = checkpoint_tensors(own, context.device, shards_of(model))
        # Progress counts whole tensors, even if the rank keeps only a part of each.
        counted = _counted(
            tensors, own.total_bytes, lambda name, _: infos[name].size_bytes, progress
        )
        load_weights(model, counted)
    progress(1.0)
    return model


def build_model(spec: ModelSpec, context: BuildContext) -> Model:
    """Build the layers of the model that `spec` describes, without weights."""
    model = model_class(spec)(spec, context)
    if spec.quantization is None:
        return model
    method = device_method(spec.quantization)
    method.implementation = context.linear
    method.experts_implementation = context.experts
    weights: dict[str, dict[str, dict[str, WeightSpec]]] = {}
    for weight in spec.logical_weights:
        holder_name, _, parameter = weight.target.rpartition(".")
        weights.setdefault(holder_name, {}).setdefault(parameter, {})[weight.shard] = weight
    for name, holder in model.holders():
        holder.store(method, weights.get(name, {}))
    method.report()
    return model


def dummy_tensors(spec: ModelSpec, seed: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield random float32 weights; a seed gives the same ones on each device of a kind.

    They are made on `device`, because a GPU makes in a second what takes a CPU a minute.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for weight in spec.logical_weights:
        if weight.kind == "norm":
            yield weight.name, torch.ones(weight.shape, device=device)
        elif weight.kind in ("bias", "zero_centered_norm"):
            yield weight.name, torch.zeros(weight.shape, device=device)
        else:
            tensor = torch.empty(weight.shape, device=device)
            yield weight.name, tensor.normal_(0.0, _DUMMY_STD, generator=generator)


def parameter_bytes(model: Model) -> int:
    """Return the number of bytes of the model's packed weights on this rank."""
    return sum(holder.size_bytes for _, holder in model.holders())


def _counted(
    tensors: Iterator[tuple[str, Tensor]],
    total: int,
    size_of: Callable[[str, Tensor], int],
    progress: Callable[[float], None],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors; report which share of the `total` bytes has been consumed."""
    done = 0
    for name, tensor in tensors:
        yield name, tensor
        done += size_of(name, tensor)
        progress(done / total)
