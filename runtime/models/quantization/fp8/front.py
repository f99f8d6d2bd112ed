"""Finds the matrices that a checkpoint stores in 8-bit codes (E4M3 or int8). Imports no torch.

The keys are those of compressed-tensors (llm-compressor), of `quant_method: fp8` (AutoFP8, Qwen,
DeepSeek) and of ModelOpt. If weight files exist, their headers decide: a matrix that they store in
16 bits stays in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.checkpoint.model_spec import FLOATS, ModelSpec, Quantization, WeightSpec
from runtime.errors import StartupError
from runtime.models.quantization.fp8.scheme import Fp8Group, Fp8Scheme
from runtime.models.quantization.module_lists import (
    Modules,
    find_kv_scales,
    find_scheme,
    is_matrix,
    is_usual,
    read_modules,
    stored_tensors,
)

CODES = ("F8_E4M3", "I8")
_MAX_BLOCK = 1024


@dataclass(frozen=True)
class Fp8Quantization(Quantization):
    """The schemes in which a checkpoint stores its matrices.

    Attributes:
        groups: schemes with the modules that they apply to.
        ignored: modules that stay in 16 bits.
        stored: whether a matrix is in 8-bit codes, by the tensor's name; `None` without weight
            files.
        while_loading: whether the files hold floats, which become E4M3 while they load.
        kv_cache_dtype: format of keys and values that the checkpoint was made for.
    """

    groups: tuple[Fp8Group, ...]
    ignored: Modules = field(default_factory=Modules)
    stored: Mapping[str, bool] | None = None
    while_loading: bool = False
    method: str = "fp8"
    kv_cache_dtype: str = "auto"

    def scheme(self, weight: WeightSpec) -> Fp8Scheme | None:
        """Return how the tensor `weight` is stored; `None` for plain numbers."""
        if not is_matrix(weight):
            return None
        if self.stored is None:
            if not is_usual(weight, self.ignored):
                return None
        elif not self.stored.get(weight.name, False):
            return None
        if self.while_loading and ".layers." not in weight.target:
            return None
        return find_scheme(self.groups, weight.name.removesuffix(".weight"))

    def expand(self, weight: WeightSpec) -> Sequence[WeightSpec]:
        """Return the tensors in which a matrix is stored: codes and scales; see `Quantization`.

        The loader also accepts floats in place of the codes, and encodes them.
        """
        scheme = self.scheme(weight)
        if scheme is None:
            return (weight,)
        stem = weight.name.removesuffix("weight")
        layer, _, parameter = weight.target.rpartition(".")
        codes = replace(weight, dtypes=(scheme.codes, *FLOATS))
        scales = [(scheme.scale, scheme.scale_shape(weight.shape), f"{parameter}_scale")]
        if scheme.is_static:
            scales.append((scheme.input_scale, (1,), f"{parameter}_input_scale"))
        return (
            codes,
            *(
                WeightSpec(
                    stem + name, shape, f"{layer}.{target}", weight.shard, "scale", of=weight.name
                )
                for name, shape, target in scales
            ),
        )

    def kept_bytes(self, weight: WeightSpec, itemsize: int, device: str) -> int:
        """Return the bytes that a matrix takes on the device; see `Quantization`.

        A GPU keeps codes, if its kernels support the sizes. A CPU keeps float32 or int8.
        """
        count = math.prod(weight.shape)
        scheme = self.scheme(weight)
        if scheme is None:
            return count * itemsize
        if device == "cpu" and not (scheme.codes == "I8" and scheme.rounds):
            return count * 4
        if device == "cpu":
            return count + 4 * weight.shape[0]
        if itemsize != 2 or any(n % 16 for n in weight.shape):
            return count * itemsize
        # On a GPU each row has scales of its own.
        return count + 4 * weight.shape[0] * scheme.scale_shape(weight.shape)[-1]

    def kv_scales(self, attention: str) -> Mapping[str, str]:
        """Return the names of a layer's key and value scales; see `Quantization`."""
        return find_kv_scales(self.stored or {}, attention)

    def renamed(self, canonical: Callable[[str], str]) -> Fp8Quantization:
        """Return the same quantization with `canonical` applied to the tensors' names."""
        if self.stored is None:
            return self
        return replace(self, stored={canonical(name): is_in for name, is_in in self.stored.items()})

    @property
    def description(self) -> str:
        """The text that describes the scheme in logs.

        An example is `fp8 (E4M3): channel scales, activations rounded by token`.
        """
        kinds = "; ".join(dict.fromkeys(group.scheme.description for group in self.groups))
        is_int = self.groups and self.groups[0].scheme.codes == "I8"
        return f"{'int8' if is_int else 'fp8 (E4M3)'}: {kinds}"


def read(path: Path, words: Mapping[str, Any]) -> Fp8Quantization:
    """Return the quantization that the keys of any of the supported tools describe.

    Args:
        path: path of the model.
        words: the content of `quantization_config`.

    Raises:
        StartupError: the scheme is not supported; the message names it and its modules.
    """
    method = words["quant_method"]
    reader = _READERS[method]
    found, stored = reader(_Words(path, words)), _stored(path)
    groups = tuple(_named_as(group, stored or {}) for group in found.groups)
    return replace(found, groups=groups, stored=stored)


def _named_as(group: Fp8Group, stored: Mapping[str, bool]) -> Fp8Group:
    """Return `group`, with the scales' names of `transformers` if the files use those names."""
    has_blocks = group.scheme.block != (0, 0)
    if has_blocks or not any(name.endswith(".weight_scale_inv") for name in stored):
        return group
    scale, input_scale = "weight_scale_inv", "activation_scale"
    return replace(group, scheme=replace(group.scheme, scale=scale, input_scale=input_scale))


def while_loading(path: Path, spec: ModelSpec) -> Fp8Quantization:  # noqa: ARG001  # of any files
    """Return the scheme of `--quantization fp8`: a scale per row, activations rounded by token."""
    return Fp8Quantization((Fp8Group(Fp8Scheme((1, 0))),), while_loading=True)


def _stored(path: Path) -> dict[str, bool] | None:
    infos = stored_tensors(path)
    return None if infos is None else {name: each.dtype in CODES for name, each in infos.items()}


class _Words:
    """A tool's quantization keys, and the errors for unsupported values."""

    def __init__(self, path: Path, words: Mapping[str, Any]) -> None:
        self.path, self.words = path, words

    def refused(self, what: str, modules: str = "Linear") -> StartupError:
        return StartupError(
            f"{self.path}: {self.words['quant_method']}: {what} of {modules} is not supported;"
            " weights in fp8 (E4M3) with a scale per tensor, channel or 128x128 block are, or in"
            " int8 per tensor or channel, with activations in 16 bits or in the same type"
        )

    def names(self, *keys: str) -> Modules:
        """Return the modules in the list under the first of `keys` that is present."""
        return read_modules(self.path, self.words, *keys)

    def block(self, value: object, modules: str = "Linear") -> tuple[int, int]:
        sizes = value if isinstance(value, list) else []
        if len(sizes) != 2 or any(
            isinstance(one, bool) or not isinstance(one, int) or not 1 <= one <= _MAX_BLOCK
            for one in sizes
        ):
            raise self.refused(f"a block of {value!r}", modules)
        return sizes[0], sizes[1]


def _read_fp8(words: _Words) -> Fp8Quantization:
    """Read the keys of AutoFP8, and of DeepSeek and Qwen, which use blocks."""
    ignored = words.names("modules_to_not_convert", "ignored_layers")
    form = words.words.get("fmt", "e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        raise words.refused(f"the form {form!r}")
    activations = words.words.get("activation_scheme", "dynamic")
    if activations not in ("static", "dynamic"):
        raise words.refused(f"the activation_scheme {activations!r}")
    size = words.words.get("weight_block_size")
    if size is None:
        scheme = Fp8Scheme((0, 0), is_static=activations == "static")
    else:
        if activations == "static":
            raise words.refused("a static scale of activations together with blocks")
        block = words.block(size)
        scheme = Fp8Scheme(block, group=block[1], scale="weight_scale_inv")
    return Fp8Quantization((Fp8Group(scheme),), ignored)


def _read_modelopt(words: _Words) -> Fp8Quantization:
    inner = words.words.get("quantization")
    if isinstance(inner, dict):
        words = _Words(words.path, {**words.words, **inner})
    ignored = words.names("ignore", "exclude_modules")
    algorithm = words.words.get("quant_algo")
    if algorithm != "FP8":
        raise words.refused(f"quant_algo {algorithm!r}")
    form = "fp8_e4m3" if words.words.get("kv_cache_quant_algo") == "FP8" else "auto"
    groups = (Fp8Group(Fp8Scheme((0, 0), is_static=True)),)
    return Fp8Quantization(groups, ignored, kv_cache_dtype=form)


_STRATEGIES = {"tensor": (0, 0), "channel": (1, 0)}


def _read_compressed_tensors(words: _Words) -> Fp8Quantization:
    groups = words.words.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise StartupError(f"{words.path}: 'config_groups' is not an object with groups")
    read = tuple(_read_group(words, group) for group in groups.values())
    return Fp8Quantization(read, words.names("ignore"))


def _read_group(words: _Words, group: Any) -> Fp8Group:
    given = group if isinstance(group, dict) else {}
    targets = given.get("targets", ["Linear"])
    if not isinstance(targets, list) or not all(isinstance(one, str) for one in targets):
        raise StartupError(f"{words.path}: 'targets' must be a list of modules")
    shown = ", ".join(targets[:3])
    weights, activations = given.get("weights"), given.get("input_activations")
    kind = _codes_of(weights)
    if not isinstance(weights, dict) or kind is None:
        raise words.refused(_named(weights, "weights"), shown)
    strategy = weights.get("strategy")
    if strategy == "block" and kind != "I8":
        block = words.block(weights.get("block_structure"), shown)
    elif strategy in _STRATEGIES:
        block = _STRATEGIES[strategy]
    else:
        raise words.refused(f"the strategy {strategy!r}", shown)
    scheme = Fp8Scheme(block, rounds=False, codes=kind)
    if activations is not None:
        if not isinstance(activations, dict) or _codes_of(activations) != kind:
            raise words.refused(_named(activations, "activations"), shown)
        if kind == "I8" and activations.get("strategy") == "group":
            raise words.refused("the strategy 'group' of int8 activations", shown)
        scheme = replace(scheme, rounds=True, **_activations(words, activations, shown))
    if given.get("output_activations") is not None:
        raise words.refused("a rounding of outputs", shown)
    return Fp8Group(scheme, tuple(targets))


def _activations(words: _Words, given: dict[str, Any], shown: str) -> dict[str, Any]:
    strategy, is_dynamic = given.get("strategy", "tensor"), given.get("dynamic", False)
    if strategy == "tensor":
        # With one dynamic scale for a whole batch, a token's numbers would depend on other
        # requests. Dynamic scales are therefore computed for each token.
        return {"is_static": is_dynamic is False}
    if strategy == "token" and is_dynamic is not False:
        return {}
    if strategy == "group" and is_dynamic is not False:
        return {"group": words.block([1, given.get("group_size")], shown)[1]}
    kind = "dynamic" if is_dynamic else "static"
    raise words.refused(f"the strategy {strategy!r} ({kind}) of activations", shown)


def _codes_of(given: object) -> str | None:
    """Return the codes' dtype, `F8_E4M3` or `I8`, for a tool's keys; `None` if not supported."""
    if not isinstance(given, dict) or given.get("num_bits") != 8:
        return None
    if given.get("symmetric", True) is not True:
        return None
    return {"float": "F8_E4M3", "int": "I8"}.get(str(given.get("type")))


def _named(given: object, what: str) -> str:
    if not isinstance(given, dict):
        return f"no form of {what}"
    kind = f"{given.get('type')}{given.get('num_bits')} {what}"
    zeros = ", with zeros" if given.get("symmetric", True) is not True else ""
    return f"{kind} (strategy {given.get('strategy')!r}{zeros})"


_READERS: dict[str, Callable[[_Words], Fp8Quantization]] = {
    "fp8": _read_fp8,
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed_tensors,
}
