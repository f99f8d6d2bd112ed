"""Reads the steps after a text encoder's layers: pooling, dense layers, normalization. No torch.

Folders of sentence-transformers describe these steps in separate files. For classifiers they follow
from the architecture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from runtime.checkpoint.config_keys import MAX_WIDTH
from runtime.checkpoint.json_file import MAX_JSON_BYTES, Keys, read_json_object
from runtime.errors import StartupError

FILE = "config_sentence_transformers.json"


@dataclass(frozen=True)
class TextPrompts:
    """Prompts that may be put before a text.

    Attributes:
        by_name: the texts of the model's prompts by name, such as `query` and `document`.
        default: name of the prompt for requests that name none; empty for no prompt.
    """

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str = ""


def read_prompts(folder: Path) -> TextPrompts:
    """Read the prompts of a model folder; without the file there are none.

    Raises:
        StartupError: a prompt is not a text, or the default is none of the prompts; the message has
            one line.
    """
    path = folder / FILE
    if not path.is_file():
        return TextPrompts()
    keys = Keys(str(path), read_json_object(path))
    prompts = {name: text or "" for name, text in keys.mapping("prompts").items()}
    if not all(isinstance(text, str) for text in prompts.values()):
        raise keys.error("prompts", "a text for each name")
    default = keys.values.get("default_prompt_name") or ""
    if not isinstance(default, str) or (default and default not in prompts):
        raise keys.error("default_prompt_name", f"one of {', '.join(prompts) or 'no prompts'}")
    return TextPrompts(prompts, default)


# Kinds of models in the names of files that set the length of texts.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
FILES = tuple(f"sentence_{kind}_config.json" for kind in _KINDS)


def read_text_limit(folder: Path) -> int | None:
    """Return how many tokens a text may have, with special ones; `None` for the model's limit.

    Raises:
        StartupError: the number is invalid, or texts must be lowercased before the tokenizer.
    """
    for name in FILES:
        path = folder / name
        if path.is_file():
            keys = Keys(str(path), read_json_object(path))
            if keys.flag("do_lower_case", False):
                raise keys.error("do_lower_case", "false: the tokenizer's own files say it")
            return keys.integer("max_seq_length", MAX_WIDTH, 0) or None
    return None


Mode = Literal["mean", "cls", "last"]
# Names of the pooling modes in files since version 6; earlier versions write flags.
_MODES: dict[str, Mode] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
_FLAGS: dict[str, Mode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}


BlockActivation = Literal["tanh", "gelu", "gelu_tanh", "relu"]
HeadActivation = Literal["", BlockActivation]
# Activations by the last part of the class name that sentence-transformers writes.
_HEAD_ACTIVATIONS: dict[str, HeadActivation] = {
    "Identity": "",
    "Tanh": "tanh",
    "GELU": "gelu",
    "ReLU": "relu",
}


# The order in which modules must come. A MultiVectorMask has no effect: it is only for comparing
# vectors, which clients do.
_ORDER = {"Transformer": 0, "Pooling": 1, "Dense": 2, "MultiVectorMask": 3, "Normalize": 3}


@dataclass(frozen=True)
class HeadLayer:
    """A dense layer after the pooled vector, with its activation and norm.

    Attributes:
        name: name of its weights in the checkpoint, without `.weight`; if `file` is set, the name
            that this code uses for them.
        in_size, out_size: elements of its input and output.
        bias: whether it has a bias.
        activation: function that is applied to its output; empty for none.
        norm: name of the layer norm after the activation; empty for none.
        norm_eps: epsilon of that norm.
        norm_bias: whether that norm has a bias.
        file: the file with its weights, relative to the folder, as `linear.weight` and
            `linear.bias`; empty if the model's files have them.
    """

    name: str
    in_size: int
    out_size: int
    bias: bool = True
    activation: HeadActivation = ""
    norm: str = ""
    norm_eps: float = 1e-5
    norm_bias: bool = False
    file: str = ""


@dataclass(frozen=True)
class Pooling:
    """How the output for a text is computed from the vectors of its tokens.

    Attributes:
        mode: which vector is used: the mean of all tokens, the first token's, or the last token's.
        normalize: whether the output is scaled to unit length.
        layers: layers after the pooled vector, in order.
        include_prompt: whether the tokens of a text's prompt are pooled too.
        per_token: whether vectors are not pooled. `layers` then apply to each token's vector (late
            interaction), and a text has no vector of its own.
    """

    mode: Mode = "mean"
    normalize: bool = True
    layers: tuple[HeadLayer, ...] = ()
    include_prompt: bool = True
    per_token: bool = False


def read_pooling(folder: Path, default: Mode, size: int) -> Pooling:
    """Return the pooling that `modules.json` and the files of its modules describe.

    Args:
        folder: folder of the model.
        default: the mode if there is no `modules.json`; vectors are then normalized.
        size: elements of a token's vector.

    Raises:
        StartupError: a kind of module or pooling is not supported; the message has one line.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return Pooling(default)
    mode: Mode | None = None
    include_prompt = True
    layers: list[HeadLayer] = []
    normalizes = False
    places: list[int] = []
    for module in _read_modules(path):
        kind = str(module.get("type", "")).rpartition(".")[2]
        name = str(module.get("path", ""))
        places.append(_ORDER.get(kind, 0))
        if kind in ("Pooling", "Dense") and not is_inside(name):
            raise StartupError(f"{path}: {name[:64]!r} is not a folder inside this one")
        if kind == "Pooling":
            path_of_mode = folder / name / "config.json"
            keys = Keys(str(path_of_mode), read_json_object(path_of_mode))
            mode, include_prompt = _read_mode(keys), keys.flag("include_prompt", True)
        elif kind == "Dense":
            layers.append(_read_dense(folder, name))
        elif kind == "Normalize":
            normalizes = True
        elif kind not in _ORDER:
            raise StartupError(
                f"{path}: a module of type {kind[:64]!r} is not supported, only Transformer, "
                "Pooling, Dense and Normalize"
            )
    if places != sorted(places) or len({layer.name for layer in layers}) < len(layers):
        raise StartupError(
            f"{path}: modules must be Transformer, Pooling, Dense, Normalize, in this order, each "
            "in a separate folder"
        )
    takes_tokens = bool(layers) and mode is None
    for layer in layers:
        if layer.in_size != size:
            raise StartupError(f"{path}: {layer.name} takes {layer.in_size} numbers, not {size}")
        size = layer.out_size
    return Pooling(
        mode or default, normalizes, tuple(layers), include_prompt, per_token=takes_tokens
    )


def is_inside(name: str) -> bool:
    """Whether a relative path stays inside the folder that it is relative to."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _read_dense(folder: Path, name: str) -> HeadLayer:
    path = folder / name / "config.json"
    keys = Keys(str(path), read_json_object(path))
    activation = str(keys.values.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in _HEAD_ACTIVATIONS:
        raise keys.error("activation_function", f"one of {', '.join(_HEAD_ACTIVATIONS)}")
    if keys.flag("use_residual", False):
        raise keys.error("use_residual", "false")
    return HeadLayer(
        name=name,
        in_size=keys.integer("in_features", MAX_WIDTH),
        out_size=keys.integer("out_features", MAX_WIDTH),
        bias=keys.flag("bias", True),
        activation=_HEAD_ACTIVATIONS[activation],
        file=f"{name}/model.safetensors",
    )


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


def _read_mode(keys: Keys) -> Mode:
    named = keys.values.get("pooling_mode")
    if named is not None:
        if not isinstance(named, str) or named not in _MODES:
            raise keys.error("pooling_mode", f"one of {', '.join(_MODES)}")
        return _MODES[named]
    asked = [
        name for name in keys.values if name.startswith("pooling_mode_") and keys.flag(name, False)
    ]
    if len(asked) == 1 and asked[0] in _FLAGS:
        return _FLAGS[asked[0]]
    known = ", ".join(_FLAGS)
    raise StartupError(f"{keys.source}: exactly one of {known} must be true, got {asked or 'none'}")
