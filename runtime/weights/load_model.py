"""Build a model and fill it: from safetensors, or with seeded random numbers."""

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
    """Build the model that `spec` describes and load its weights.

    Args:
        folder: local folder with the weights; not read for dummy weights.
        spec: what `read_model_spec` returned.
        context: type, device and rank.
        progress: called with the share of bytes that are loaded, from 0 to 1.
        load_format: `auto` or `safetensors` for the folder's weights, `dummy` for random ones.
        seed: seed of dummy weights.

    Raises:
        StartupError: the folder's weights cannot be read or do not fit; the message is one line.
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
        # Counts whole tensors, even if the rank takes only a part.
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
    """Yield random float32 weights of the right shapes, the same for one seed and kind of device.

    They are made on `device`: a GPU makes in a second what takes a CPU a minute.
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
    """Return the bytes that the model's weights hold, packed, on this rank."""
    return sum(holder.size_bytes for _, holder in model.holders())


def _counted(
    tensors: Iterator[tuple[str, Tensor]],
    total: int,
    size_of: Callable[[str, Tensor], int],
    progress: Callable[[float], None],
) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors through; report the share that has been consumed."""
    done = 0
    for name, tensor in tensors:
        yield name, tensor
        done += size_of(name, tensor)
        progress(done / total)
