"""Finds whether a checkpoint stores experts separately or in one tensor. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.headers import read_tensor_infos
from runtime.checkpoint.model_spec import ModelSpec
from runtime.errors import StartupError
from runtime.models.decoder.spec import DecoderSpec


def with_experts_of_files(folder: Path, spec: ModelSpec) -> ModelSpec:
    """Return `spec` with the form in which the files in `folder` store experts.

    For example, Qwen3.5's checkpoints in 16 bits store all experts in one tensor, and those in 8
    bits store separate tensors.

    Args:
        folder: the model's folder or GGUF file; `check_model_folder` reports weights that cannot be
            read.
        spec: the model as `config.json` describes it.
    """
    has_files = folder.is_dir() or is_gguf(folder)
    if not isinstance(spec, DecoderSpec) or spec.experts is None or not has_files:
        return spec
    experts = spec.experts
    if experts.stacked is None or not experts.stacked.is_optional or not experts.layers:
        return spec
    try:
        names = {spec.canonical(name) for name in read_tensor_infos(folder)}
    except (StartupError, OSError):
        return spec
    first = f"model.layers.{min(experts.layers)}.{experts.names.block}.experts.0."
    if not any(name.startswith(first) for name in names):
        return spec
    return replace(spec, experts=replace(experts, stacked=None))
