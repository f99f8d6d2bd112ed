"""How a folder wants its vectors made, as sentence-transformers writes it. Front-safe: no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from runtime.checkpoint.json_file import MAX_JSON_BYTES, Keys, read_json_object
from runtime.errors import StartupError

Mode = Literal["mean", "cls", "last"]
_MODES: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class Pooling:
    """How one vector is made of a text's tokens.

    Attributes:
        mode: the mean of all tokens, the first token, or the last.
        normalize: whether the vector is scaled to unit length.
    """

    mode: Mode = "mean"
    normalize: bool = True


def read_pooling(folder: Path, default: Mode) -> Pooling:
    """Read `modules.json` and the pooling's own file.

    Args:
        folder: of the model.
        default: for a folder without `modules.json`, whose vectors then have unit length.

    Raises:
        StartupError: a kind of module or pooling that is not supported; one line.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return Pooling(default)
    modules = _read_modules(path)
    mode: Mode | None = None
    normalizes = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            mode = _read_mode(folder / str(module.get("path", "")) / "config.json")
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise StartupError(
                f"{path}: a module of type {kind[:64]!r} is not supported, only Transformer, "
                "Pooling and Normalize"
            )
    return Pooling(mode or default, normalizes)


def _read_modules(path: Path) -> list[dict[str, Any]]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise StartupError(f"{path} is larger than {MAX_JSON_BYTES // 2**20} MiB")
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise StartupError(f"{path} is not a list of objects")
    return modules


def _read_mode(path: Path) -> Mode:
    keys = Keys(str(path), read_json_object(path))
    asked = [
        name for name in keys.values if name.startswith("pooling_mode_") and keys.flag(name, False)
    ]
    if len(asked) == 1 and asked[0] in _MODES:
        return _MODES[asked[0]]
    known = ", ".join(_MODES)
    raise StartupError(f"{path}: exactly one of {known} must be true, got {asked or 'none'}")
