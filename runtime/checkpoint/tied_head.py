"""Finds output heads that `config.json` ties to the embeddings, but that differ in the files.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from runtime.checkpoint.headers import read_tensor_infos
from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.regular_file import open_regular
from runtime.checkpoint.tensor_info import TensorInfo
from runtime.errors import StartupError

_PIECE_BYTES = 1 << 22


def with_head_of_files(folder: Path, model: ModelSpec) -> ModelSpec:
    """Return `model` with a separate output head, if the weights in `folder` have one.

    As in `transformers`, `tie_word_embeddings` is then taken to be wrong, because a wrong head
    would make every output token wrong. Matrices of different types count as different. The
    comparison ends at the first difference.

    Args:
        folder: the model's folder. Weights that cannot be read are reported by
            `check_model_folder`, not here.
        model: the model as `config.json` describes it.
    """
    if not model.aliases or not folder.is_dir():
        return model
    try:
        found = {model.canonical(name): info for name, info in read_tensor_infos(folder).items()}
        for alias, name in model.aliases.items():
            if alias in found and name in found and _differ(found[alias], found[name]):
                return model.untied()
    except (StartupError, OSError):
        return model
    return model


def _differ(one: TensorInfo, other: TensorInfo) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return True
    with open_regular(one.file) as first, open_regular(other.file) as second:
        pieces = zip(_pieces(first, one), _pieces(second, other), strict=True)
        return any(mine != theirs for mine, theirs in pieces)


def _pieces(file: FileIO, info: TensorInfo) -> Iterator[bytes]:
    for start in range(info.start, info.end, _PIECE_BYTES):
        file.seek(start)
        wanted = min(_PIECE_BYTES, info.end - start)
        piece = file.read(wanted)
        while len(piece) < wanted:
            more = file.read(wanted - len(piece))
            if not more:
                raise StartupError(f"{info.file} ends inside of tensor {info.name!r}")
            piece += more
        yield piece
