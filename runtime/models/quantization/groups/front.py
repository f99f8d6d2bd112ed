"""Finds the matrices that a checkpoint stores as 4-bit or 8-bit integers (codes).

Imports no torch.

The keys are those of GPTQ (AutoGPTQ, GPTQModel), AWQ (AutoAWQ) and compressed-tensors
(llm-compressor). If weight files exist, their headers decide: a matrix that they store in 16 bits
stays in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.checkpoint.model_spec import Quantization, WeightSpec
from runtime.errors import StartupError
from runtime.models.quantization.groups.group_scheme import CodesGroup, GroupScheme, Layout
from runtime.models.quantization.module_lists import (
    Modules,
    find_kv_scales,
    find_scheme,
    is_matrix,
    is_usual,
    read_modules,
    stored_tensors,
)

_MAX_GROUP = 16384


@dataclass(frozen=True)
class GroupQuantization(Quantization):
    """The schemes in which a checkpoint stores its matrices.

    Attributes:
        groups: schemes with the modules that they apply to.
        ignored: modules that stay in 16 bits.
        stored: names of all tensors; `None` if there are no files.
        kv_cache_dtype: format of keys and values that the checkpoint was made for.
    """

    groups: tuple[CodesGroup, ...]
    ignored: Modules = field(default_factory=Modules)
    stored: frozenset[str] | None = None
    method: str = "groups"
    kv_cache_dtype: str = "auto"

    def scheme(self, weight: WeightSpec) -> GroupScheme | None:
        """Return how the tensor `weight` is stored; `None` for plain numbers."""
        if not is_matrix(weight):
            return None
        stem = weight.name.removesuffix("weight")
        found = find_scheme(self.groups, stem.removesuffix("."))
        if found is None:
            return None
        if self.stored is None:
            return found if is_usual(weight, self.ignored) else None
        code, _, _, order = found.names
        if stem + code not in self.stored:
            return None
        return replace(found, has_order=bool(order) and stem + order in self.stored)

    def expand(self, weight: WeightSpec) -> Sequence[WeightSpec]:
        """Return the tensors in which a matrix is stored: codes, scales and others.

        See `Quantization`.
        """
        scheme = self.scheme(weight)
        if scheme is None:
            return (weight,)
        problem = scheme.problem(weight.shape)
        if problem:
            raise StartupError(f"{weight.name} cannot be stored as its scheme says: {problem}")
        stem = weight.name.removesuffix("weight")
        code = stem + scheme.names[0]
        return [
            WeightSpec(
                stem + each.name,
                each.shape,
                weight.target + each.target,
                weight.shard,
                "scale" if each.target else "matrix",
                each.dtypes,
                of=code if each.target else "",
            )
            for each in scheme.tensors(weight.shape)
        ]

    def kept_bytes(self, weight: WeightSpec, itemsize: int, device: str) -> int:
        """Return the bytes that a matrix takes on the device; see `Quantization`.

        These are codes, or widened numbers if a GPU's kernels do not support the codes.
        """
        count = math.prod(weight.shape)
        scheme = self.scheme(weight)
        if scheme is None:
            return count * itemsize
        is_expert = ".experts." in weight.target
        if device != "cpu" and (itemsize != 2 or (is_expert and self._is_ordered(weight))):
            return count * itemsize
        groups = math.prod(weight.shape) // scheme.group_of(weight.shape[1])
        return count * scheme.bits // 8 + 4 * groups

    def _is_ordered(self, weight: WeightSpec) -> bool:
        """Whether a group may consist of any columns of the matrix instead of neighboring ones."""
        found = find_scheme(self.groups, weight.name.removesuffix(".weight"))
        return found is not None and found.has_order

    def kv_scales(self, attention: str) -> Mapping[str, str]:
        """Return the names of a layer's key and value scales; see `Quantization`."""
        return find_kv_scales(self.stored or (), attention)

    def renamed(self, canonical: Callable[[str], str]) -> GroupQuantization:
        """Return the same quantization with `canonical` applied to the tensors' names."""
        if self.stored is None:
            return self
        return replace(self, stored=frozenset(map(canonical, self.stored)))

    @property
    def description(self) -> str:
        """Text for logs, such as `weights only: int4, groups of 128`."""
        kinds = "; ".join(dict.fromkeys(group.scheme.description for group in self.groups))
        return f"weights only: {kinds}"


def read(path: Path, words: Mapping[str, Any]) -> GroupQuantization:
    """Return the quantization that the keys of any of the supported tools describe.

    Args:
        path: path of the model.
        words: the content of `quantization_config`.

    Raises:
        StartupError: a scheme is not supported; the message names it and its modules.
    """
    found = _READERS[words["quant_method"]](_Words(path, words))
    infos = stored_tensors(path)
    return replace(found, stored=None if infos is None else frozenset(infos))


class _Words:
    """A tool's quantization keys, and the errors for unsupported values."""

    def __init__(self, path: Path, words: Mapping[str, Any]) -> None:
        self.path, self.words = path, words

    def refused(self, what: str, modules: str = "Linear") -> StartupError:
        return StartupError(
            f"{self.path}: {self.words['quant_method']}: {what} of {modules} is not supported;"
            " weights of 4 or 8 bits in groups or channels are, with activations in 16 bits"
        )

    def first(self, *keys: str) -> Any:
        return next((self.words[key] for key in keys if key in self.words), None)

    def bits(self, value: object, modules: str = "Linear") -> int:
        if isinstance(value, bool) or value not in (4, 8):
            raise self.refused(f"{value!r} bits", modules)
        return 4 if value == 4 else 8

    def group(self, value: object, modules: str = "Linear") -> int:
        if value == -1:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_GROUP:
            raise self.refused(f"a group of {value!r}", modules)
        return value


def _read_gptq(words: _Words) -> GroupQuantization:
    form = words.first("checkpoint_format") or "gptq"
    layouts: dict[str, Layout] = {"gptq": "gptq", "gptq_v2": "gptq_v2"}
    if form not in layouts:
        raise words.refused(f"checkpoint_format {form!r}")
    rules = words.first("dynamic") or {}
    if not isinstance(rules, dict):
        raise StartupError(f"{words.path}: 'dynamic' must be an object of modules")
    # In GPTQModel's keys, `-:` before an expression leaves the modules that it matches in 16 bits.
    other = [name for name in rules if not name.startswith("-:")]
    if other:
        raise words.refused("a scheme of their own", ", ".join(other[:3]))
    left = {"left": [f"re:{name.removeprefix('-:')}" for name in rules]}
    scheme = GroupScheme(
        layouts[form],
        words.bits(words.first("bits")),
        words.group(words.first("group_size")),
        has_zeros=True,
        has_order=bool(words.first("desc_act")),
        is_symmetric=words.first("sym") is not False,
    )
    keys = ("modules_to_not_convert",) if words.first("modules_to_not_convert") else ("left",)
    return GroupQuantization(
        (CodesGroup(scheme),), read_modules(words.path, {**words.words, **left}, *keys)
    )


def _read_awq(words: _Words) -> GroupQuantization:
    version = str(words.first("version") or "gemm").lower()
    if version != "gemm":
        raise words.refused(f"the version {version!r}")
    bits = words.bits(words.first("bits", "w_bit"))
    if bits != 4:
        raise words.refused(f"{bits} bits")
    group = words.group(words.first("group_size", "q_group_size"))
    has_zeros = words.first("zero_point") is not False
    return GroupQuantization(
        (CodesGroup(GroupScheme("awq", bits, group, has_zeros)),),
        read_modules(words.path, words.words, "modules_to_not_convert"),
    )


def _read_packed(words: _Words) -> GroupQuantization:
    groups = words.words.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise StartupError(f"{words.path}: 'config_groups' is not an object with groups")
    read_groups = tuple(_read_group(words, group) for group in groups.values())
    return GroupQuantization(read_groups, read_modules(words.path, words.words, "ignore"))


def _read_group(words: _Words, group: Any) -> CodesGroup:
    given = group if isinstance(group, dict) else {}
    targets = given.get("targets", ["Linear"])
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise StartupError(f"{words.path}: 'targets' must be a list of modules")
    shown = ", ".join(targets[:3])
    weights = given.get("weights")
    if not isinstance(weights, dict):
        raise words.refused("no form of weights", shown)
    if weights.get("type") != "int":
        kind = f"{weights.get('type')}{weights.get('num_bits')} weights beside packed ones"
        raise words.refused(kind, shown)
    for what in ("input_activations", "output_activations"):
        if given.get(what) is not None:
            raise words.refused(f"a rounding of {what.partition('_')[0]}s", shown)
    strategy = weights.get("strategy")
    if strategy == "group":
        size = words.group(weights.get("group_size"), shown)
    elif strategy == "channel":
        size = 0
    else:
        raise words.refused(f"the strategy {strategy!r}", shown)
    has_zeros = weights.get("symmetric", True) is False
    bits = words.bits(weights.get("num_bits"), shown)
    has_order = weights.get("actorder") == "group"
    return CodesGroup(GroupScheme("packed", bits, size, has_zeros, has_order), tuple(targets))


_READERS: dict[str, Callable[[_Words], GroupQuantization]] = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "compressed-tensors": _read_packed,
}
