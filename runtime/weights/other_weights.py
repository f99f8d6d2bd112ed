"""Finds other weights for a serving model, in a folder or on a hub, and checks that they fit."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

from runtime.checkpoint.check import check_model_folder, warn_of_files
from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.headers import read_tensor_infos
from runtime.checkpoint.hub import RepositoryNotFound, resolve_model_folder
from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.tied_head import with_head_of_files
from runtime.checkpoint.weight_roots import WeightRoots
from runtime.errors import HeadraceError, StartupError
from runtime.eventloop.offload import OffloadPool
from runtime.models.registry import read_model_spec

logger = logging.getLogger(__name__)

UNTOUCHED = "\nNothing was loaded: the original weights keep serving."
# Threads that find a folder, or download a model from a hub, which may take long.
_FETCHING = OffloadPool("fetching of a model", workers=4, max_queued=16, timeout_s=3600.0)
# Threads that read headers and configuration; if a file system hangs, the call times out.
_READING = OffloadPool("reading of model files", workers=4, max_queued=16, timeout_s=120.0)
# Fields in which two models may differ although tensors have the same meaning in both.
_IRRELEVANT = frozenset(
    {
        "raw",
        "dtype",
        "generation_defaults",
        "eos_token_ids",
        "bos_token_id",
        "context_len",
        "quantization",
        "score_activation",
        "has_own_head",
    }
)


async def find_other_weights(
    model_path: str, model: ModelSpec, roots: WeightRoots | None
) -> Path | str:
    """Return the folder of weights that fit a model; if there is none, a message that says why.

    Args:
        model_path: a folder or a hub id.
        model: the model that is being served.
        roots: which folders and hub ids are allowed; `None` allows all.
    """
    try:
        find = resolve_model_folder if roots is None else roots.find
        folder = await _FETCHING.run(find, model_path)
        await _READING.run(read_tensor_infos, folder)
    except StartupError as error:
        # The error's advice is for the operator, so it is logged and not in the answer.
        logger.warning("No weights from %r: %s", model_path[:256], error.message)
        return f"Failed to get weights iterator: {_sentence(error)}"
    try:
        await _READING.run(_check, folder, model)
    except StartupError as error:
        return f"Failed to update weights: {_sentence(error)}{UNTOUCHED}"
    return folder


def _check(folder: Path, model: ModelSpec) -> None:
    """Check that a folder's model has the same tensors, with the same meaning, as the served one.

    Raises:
        StartupError: it is another model; the message has one line.
    """
    # A folder without `config.json` is taken to have the same model, perhaps with a separate head.
    other = with_head_of_files(folder, model)
    if is_gguf(folder) or (folder / "config.json").is_file():
        other = read_model_spec(folder, model.overrides, is_embedding=model.gives == "vectors")
    if other.architecture != model.architecture:
        raise StartupError(
            f"{folder} holds another model than the one that serves: architecture is "
            f"{other.architecture!r}, not {model.architecture!r}"
        )
    different = [
        f"{field.name} is {getattr(other, field.name)!r}, not {getattr(model, field.name)!r}"
        for field in dataclasses.fields(model)
        if field.name not in _IRRELEVANT
        and getattr(other, field.name) != getattr(model, field.name)
    ]
    if different:
        raise StartupError(
            f"{folder} holds another model than the one that serves: {'; '.join(different[:3])}"
        )
    warn_of_files(folder, other, check_model_folder(folder, model))


def _sentence(error: HeadraceError) -> str:
    if isinstance(error, RepositoryNotFound):
        return f"{error.repo_id} (repository not found)."
    return f"{error.message.rstrip('.')}."
