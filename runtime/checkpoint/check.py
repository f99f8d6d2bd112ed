"""Checks that a folder has the weights that its configuration describes; reads only headers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.headers import read_header, read_tensor_infos
from runtime.checkpoint.model_spec import FLOATS, ModelSpec, WeightSpec
from runtime.checkpoint.tensor_info import TensorInfo
from runtime.errors import StartupError

logger = logging.getLogger(__name__)

# The maximum number of unused tensors that a warning names.
_MAX_NAMED = 16
# Plain types of checkpoints, and for each the type in which the model is then computed.
_FLOAT_DTYPES = {"F32": "float32", "F64": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class CheckpointSummary:
    """What the headers say about a folder's weights.

    Attributes:
        total_bytes: bytes on disk of the tensors that are used.
        dtype: the type of most of these bytes: `float32`, `float16` or `bfloat16`.
        tensors: the used tensors, by their name in `ModelSpec.weights`, in the order of files and
            bytes; `TensorInfo.name` is the name in the file.
        unused: names of tensors that the model does not use. Tensors that are known to be
            superfluous, such as heads and adapters of training, are not among them.
    """

    total_bytes: int
    dtype: str
    tensors: dict[str, TensorInfo]
    unused: tuple[str, ...] = ()


def check_model_folder(folder: Path, model: ModelSpec) -> CheckpointSummary:
    """Check the headers of a folder's weights against the weights that `model` needs.

    Raises:
        StartupError: weights cannot be read, or tensors are missing or of the wrong shape or type.
            The message is one line that names the first few of them. It names unexpected tensors
            too, because a renamed weight is both missing and unexpected.
    """
    found: dict[str, TensorInfo] = {}
    for name, info in read_tensor_infos(folder).items():
        found[model.canonical(name)] = info
    for alias, name in model.aliases.items():
        # A matrix that two layers share may be stored under either name.
        if alias in found and name not in found:
            found[name] = found.pop(alias)
    for layer in model.pooling.layers:
        if layer.file:
            for info in read_header(folder / layer.file):
                found[f"{layer.name}.{info.name.removeprefix('linear.')}"] = info
    specs = {spec.name: spec for spec in model.weights}
    used = {name: info for name, info in found.items() if name in specs}
    missing = [
        name
        for name, spec in specs.items()
        if name not in found and not (spec.of in found and found[spec.of].dtype in FLOATS)
    ]
    unexpected = [name for name in found if name not in specs and not model.is_ignored(name)]
    wrong_shape = [
        f"{name} is {list(info.shape)}, expected {list(specs[name].shape)}"
        for name, info in used.items()
        if not specs[name].has_shape(info.shape)
    ]
    wrong_type = [
        f"{name} is {info.dtype}"
        for name, info in used.items()
        if info.dtype not in specs[name].dtypes
    ]
    problems = [
        describe("missing", missing),
        describe("of the wrong shape", wrong_shape),
        describe(_allowed(specs.values()), wrong_type),
    ]
    if any(problems):
        problems.append(describe("unexpected", unexpected))
        words = "metadata describes" if is_gguf(folder) else "config.json describes"
        raise StartupError(
            f"The weights in {folder} do not fit {model.architecture} as its {words} it:"
            f" {'; '.join(filter(None, problems))}"
        )
    sizes: Counter[str] = Counter()
    for info in used.values():
        sizes[_FLOAT_DTYPES.get(info.dtype, model.dtype)] += info.size_bytes
    return CheckpointSummary(sizes.total(), sizes.most_common(1)[0][0], used, tuple(unexpected))


def warn_of_files(folder: Path, model: ModelSpec, summary: CheckpointSummary) -> None:
    """Log a warning for each difference between a folder's weights and its configuration."""
    if summary.unused:
        found = describe("unused", summary.unused, most=_MAX_NAMED)
        logger.warning("%s: %s: %s has no place for them.", folder, found, model.architecture)
    if model.has_own_head:
        logger.warning(
            "%s: the head differs from the embeddings, so they are not tied; set "
            "tie_word_embeddings to false in config.json.",
            folder,
        )


def _allowed(weights: Iterable[WeightSpec]) -> str:
    if all(weight.dtypes == FLOATS for weight in weights):
        return "not of a floating type"
    return "not stored as its scheme of quantization says"


def describe(problem: str, names: Iterable[str], most: int = 3) -> str:
    """Return a text such as `2 tensors missing (a, b)`; empty if there are no `names`.

    Args:
        problem: what is wrong with the tensors.
        names: the tensors' names.
        most: how many of them are listed.
    """
    listed = list(names)
    if not listed:
        return ""
    shown = ", ".join(listed[:most]) + (", ..." if len(listed) > most else "")
    noun = "tensor" if len(listed) == 1 else "tensors"
    return f"{len(listed)} {noun} {problem} ({shown})"
