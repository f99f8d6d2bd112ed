"""Lists of modules in the notations of quantization tools, and the schemes of these modules.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from runtime.checkpoint.headers import read_tensor_infos
from runtime.checkpoint.model_spec import WeightSpec
from runtime.checkpoint.tensor_info import TensorInfo
from runtime.errors import StartupError

SchemeT = TypeVar("SchemeT")

# Matrices that tools leave in 16 bits: heads, routers and gates; and embeddings.
_NOT_LINEAR = re.compile(r"(^|\.)(lm_head|score|classifier|router|shared_gate)\.\w+$")
_EMBEDDING = re.compile(r"(^|\.)\w*embed\w*\.\w+$")


@dataclass(frozen=True)
class Modules:
    """A list of modules, in the notation of any quantization tool.

    Attributes:
        names: names or ends of names, `re:` expressions, or patterns with `*` as in a shell.
    """

    names: tuple[str, ...] = ()
    _expressions: tuple[re.Pattern[str], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_expressions", tuple(map(_expression, self.names)))

    def __contains__(self, module: str) -> bool:
        return any(expression.match(module) for expression in self._expressions)


def _expression(name: str) -> re.Pattern[str]:
    if name.startswith("re:"):
        return re.compile(name[3:])
    if "*" in name:
        return re.compile(re.escape(name).replace(r"\*", ".*") + r"\Z")
    # The name of a module, which includes all modules within it. `transformers` may list only the
    # last part of a name.
    return re.compile(rf"(.*\.)?{re.escape(name)}(\..*)?\Z")


@dataclass(frozen=True)
class SchemeGroup(Generic[SchemeT]):
    """A scheme, and the modules whose matrices have this scheme.

    Attributes:
        scheme: how the matrices are stored.
        targets: names of modules, `re:` expressions, or classes of modules such as `Linear`.
    """

    scheme: SchemeT
    targets: tuple[str, ...] = ("Linear",)


def find_scheme(groups: Sequence[SchemeGroup[SchemeT]], module: str) -> SchemeT | None:
    """Return the scheme of the linear module `module`; `None` if no group applies to it."""
    named = [group for group in groups if module in Modules(group.targets)]
    of_all = [group for group in groups if "Linear" in group.targets]
    found = [*named, *of_all]
    return found[0].scheme if found else None


def is_matrix(weight: WeightSpec) -> bool:
    """Whether tools may quantize a weight: a matrix of a product, but not embeddings."""
    return (
        weight.kind == "matrix"
        and len(weight.shape) == 2
        and weight.name.endswith(".weight")
        and not _EMBEDDING.search(weight.target)
    )


def is_usual(weight: WeightSpec, ignored: Modules) -> bool:
    """Whether a tool quantizes a matrix, judged by its configuration without weight files."""
    module = weight.name.removesuffix(".weight")
    return not _NOT_LINEAR.search(weight.target) and module not in ignored


def read_modules(path: Path, words: Mapping[str, Any], *keys: str) -> Modules:
    """Return the modules in the list under the first of `keys` that is present.

    Raises:
        StartupError: the value is not a list of modules; the message is one line.
    """
    for key in keys:
        value = words.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise StartupError(f"{path}: {key!r} must be a list of modules")
        try:
            return Modules(tuple(value))
        except re.error as error:
            raise StartupError(f"{path}: {key!r} is not a regular expression: {error}") from error
    return Modules()


def stored_tensors(path: Path) -> dict[str, TensorInfo] | None:
    """Return the tensors of a model's weight files by name; `None` if there are no files."""
    try:
        return read_tensor_infos(path if path.is_dir() else path.parent)
    except (StartupError, OSError):
        return None


def find_kv_scales(stored: Container[str], attention: str) -> Mapping[str, str]:
    """Return the names of an attention module's scales of keys (`k`) and values (`v`).

    Args:
        stored: names of the stored tensors.
        attention: name of the attention module.

    Returns:
        A map with the keys `k` and `v`; empty unless both scales are stored.
    """
    found = {}
    for which in ("k", "v"):
        # The names of compressed-tensors, then those of ModelOpt.
        for name in (f"{attention}.{which}_scale", f"{attention}.{which}_proj.{which}_scale"):
            if name in stored:
                found[which] = name
    return found if len(found) == 2 else {}
