"""Reads a PEFT folder with a low-rank adapter (LoRA) of some of a model's matrices, without torch.

PEFT has variants of LoRA with different arithmetic, such as DoRA. An adapter that uses one is
refused, and the error names the variant. An adapter with a tensor that does not fit the served
model is refused too.

Source: `adapter_config.json` and the tensors' names, as PEFT 0.17 writes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from runtime.checkpoint.headers import read_header
from runtime.checkpoint.json_file import Keys, read_json_object
from runtime.checkpoint.model_spec import FLOATS, ModelSpec, WeightSpec
from runtime.checkpoint.tensor_info import TensorInfo
from runtime.errors import StartupError

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
PICKLED_FILE = "adapter_model.bin"
MAX_RANK = 512
MAX_ALPHA = 1e6
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.\w+)?\.weight"
)
# Matrices that attention over latents uses in another form, so adapters cannot change them.
_ABSORBED = {"kv_b_proj", "k_b_proj", "v_b_proj"}
_IN_LAYERS = re.compile(r"model\.layers\.\d+\..+\.weight")
# Matches a key of `rank_pattern` or `alpha_pattern` that is a name, not a regular expression.
_PLAIN_KEY = re.compile(r"\^?[\w.]+\$?")
# Keys that change the arithmetic of plain adapters, with the name of the feature for the error.
_OTHER_ARITHMETIC = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "lora_bias": "lora_bias",
    "fan_in_fan_out": "fan_in_fan_out",
    "layer_replication": "layer_replication",
    "alora_invocation_tokens": "activated LoRA",
    "trainable_token_indices": "trainable_token_indices",
    "target_parameters": "target_parameters (adapters of experts)",
}
# Ways to initialise an adapter that change the weights of its base model as well.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True)
class AdapterMatrix:
    """What an adapter adds to one matrix of the model: `scale` times the product of `b` and `a`.

    Attributes:
        weight: the matrix, as its family lists it.
        a: `[rank, in_features]`.
        b: `[out_features, rank]`.
        rank: the rank of the product.
        scale: factor of the product.
    """

    weight: WeightSpec
    a: TensorInfo
    b: TensorInfo
    rank: int
    scale: float


@dataclass(frozen=True)
class AdapterSpec:
    """A checked adapter.

    Attributes:
        rank: the largest rank of the adapter's matrices.
        matrices: the adapter's matrices, at least one.
    """

    rank: int
    matrices: tuple[AdapterMatrix, ...]


def adaptable_weights(model: ModelSpec) -> dict[str, WeightSpec]:
    """Return the matrices that adapters may change, by the names of their modules.

    They are the linear layers in the decoder's blocks, without the experts of a mixture.
    Embeddings, head and image towers are not among them. Neither are routers that compute in
    float32, because an adapter's factors have the model's type.
    """
    return {
        weight.name.removesuffix(".weight"): weight
        for weight in model.logical_weights
        if weight.kind == "matrix"
        and not weight.is_precise
        and _IN_LAYERS.fullmatch(weight.target)
        and module_kind(weight.target.removesuffix(".weight")) not in _ABSORBED
    }


def module_kind(module: str) -> str:
    """Return the last part of a module's name, such as `q_proj`."""
    return module.rpartition(".")[2]


def target_modules(model: ModelSpec, asked: Collection[str]) -> list[str]:
    """Return the kinds of modules that adapters may change, such as `q_proj`, sorted.

    Args:
        model: the served model.
        asked: the wanted kinds; an empty collection, or one with `all`, means all kinds.

    Raises:
        StartupError: the model has no module of a wanted kind; the message lists its kinds.
    """
    known = sorted({module_kind(module) for module in adaptable_weights(model)})
    if not asked or "all" in asked or "all-linear" in asked:
        return known
    for kind in asked:
        if kind not in known:
            raise StartupError(
                f"--lora-target-modules {kind}: {model.architecture} has no such module that "
                f"adapters may change; it has {', '.join(known)}"
            )
    return sorted(set(asked))


def read_adapter(
    folder: Path, model: ModelSpec, max_rank: int, targets: Collection[str]
) -> AdapterSpec:
    """Read and check an adapter's folder.

    Args:
        folder: a folder with `adapter_config.json` and `adapter_model.safetensors`.
        model: the served model.
        max_rank: the largest rank that the server has memory for.
        targets: kinds of modules that the server has memory for.

    Raises:
        StartupError: the adapter cannot be served; the message is one line that says why.
    """
    if not folder.is_dir():
        raise StartupError(f"{folder} is not an adapter's folder")
    if not (folder / TENSORS_FILE).is_file() and (folder / PICKLED_FILE).exists():
        raise StartupError(
            f"{folder} has only {PICKLED_FILE}, which is not loaded because pickles can run code; "
            "convert it with PEFT's save_pretrained, which writes safetensors"
        )
    config = read_json_object(folder / CONFIG_FILE)
    infos = {info.name: info for info in read_header(folder / TENSORS_FILE)}
    return check_adapter(Keys(str(folder / CONFIG_FILE), config), infos, model, max_rank, targets)


def check_adapter(
    config: Keys,
    infos: Mapping[str, TensorInfo],
    model: ModelSpec,
    max_rank: int,
    targets: Collection[str],
) -> AdapterSpec:
    """Check an adapter's configuration and tensors; other arguments are as in `read_adapter`.

    Raises:
        StartupError: the adapter cannot be served; the message is one line that says why.
    """
    _refuse_other_arithmetic(config)
    _refuse_saved_modules(config)
    factors: dict[str, dict[str, TensorInfo]] = {}
    strange = []
    for name, info in infos.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            strange.append(name)
        else:
            factors.setdefault(match["module"], {})[match["side"]] = info
    if strange:
        raise StartupError(f"{config.source}: {_why_strange(strange)}")
    if not factors:
        raise StartupError(f"{config.source}: the adapter has no tensors")
    places = adaptable_weights(model)
    modules = {each: model.canonical(f"{each}.weight").removesuffix(".weight") for each in factors}
    unknown = sorted(each for each in factors if modules[each] not in places)
    if unknown:
        raise StartupError(f"{config.source}: {_why_unknown(unknown, modules, model)}")
    closed = sorted({module_kind(modules[each]) for each in factors} - set(targets))
    if closed:
        raise StartupError(
            f"{config.source}: the adapter changes {', '.join(closed)}, and this server has room "
            f"for adapters of {', '.join(sorted(targets))}; see --lora-target-modules"
        )
    matrices = tuple(
        _matrix(config, places[modules[module]], module, pair, max_rank)
        for module, pair in factors.items()
    )
    return AdapterSpec(max(matrix.rank for matrix in matrices), matrices)


def rank_of(config: Keys, module: str) -> int:
    """Return the rank that an adapter's configuration gives a module.

    Raises:
        StartupError: the rank is not a valid number, or a pattern is a regular expression.
    """
    found = _by_pattern(config, "rank_pattern", module)
    if found is None:
        return config.integer("r", MAX_RANK)
    return Keys(config.source, {"rank_pattern": found}).integer("rank_pattern", MAX_RANK)


def _scale_of(config: Keys, module: str, rank: int) -> float:
    found = _by_pattern(config, "alpha_pattern", module)
    if found is None:
        alpha = config.number("lora_alpha", 0.0, MAX_ALPHA, 8.0)
    else:
        alpha = Keys(config.source, {"alpha_pattern": found}).number(
            "alpha_pattern", 0.0, MAX_ALPHA
        )
    return alpha / (math.sqrt(rank) if config.flag("use_rslora", False) else rank)


def _by_pattern(config: Keys, key: str, module: str) -> object:
    for pattern, value in config.mapping(key).items():
        if not _PLAIN_KEY.fullmatch(pattern):
            raise StartupError(
                f"{config.source}: {key} names {pattern[:64]!r}; only names of modules are "
                "supported there, no regular expressions"
            )
        name = pattern.removeprefix("^").removesuffix("$")
        if module == name or module.endswith(f".{name}"):
            return value
    return None


def _matrix(
    config: Keys, weight: WeightSpec, module: str, pair: Mapping[str, TensorInfo], max_rank: int
) -> AdapterMatrix:
    if len(pair) != 2:
        raise StartupError(f"{config.source}: {module} has only one of lora_A and lora_B")
    rank = rank_of(config, module)
    if rank > max_rank:
        raise StartupError(
            f"{config.source}: rank {rank} is more than the {max_rank} that this server has room "
            "for; see --max-lora-rank"
        )
    out_features, in_features = weight.shape
    for side, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
        info = pair[side]
        if info.shape != shape:
            raise StartupError(
                f"{config.source}: {info.name!r} is {list(info.shape)}, expected {list(shape)}"
            )
        if info.dtype not in FLOATS:
            raise StartupError(
                f"{config.source}: {info.name!r} is {info.dtype}, expected {', '.join(FLOATS)}"
            )
    return AdapterMatrix(weight, pair["A"], pair["B"], rank, _scale_of(config, module, rank))


def _refuse_other_arithmetic(config: Keys) -> None:
    kind = config.values.get("peft_type", "LORA")
    if kind != "LORA":
        raise StartupError(f"{config.source}: peft_type is {str(kind)[:64]!r}; only LORA is served")
    for key, name in _OTHER_ARITHMETIC.items():
        if config.values.get(key):
            raise StartupError(f"{config.source}: {name} is not supported")
    bias = config.values.get("bias", "none")
    if bias not in (None, "none"):
        raise StartupError(f"{config.source}: bias is {str(bias)[:64]!r}; only 'none' is supported")
    start = config.values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise StartupError(
            f"{config.source}: init_lora_weights is {start[:64]!r}, which changes the base's "
            "weights as well; save the adapter with path_initial_model_for_weight_conversion"
        )


def _refuse_saved_modules(config: Keys) -> None:
    saved = config.values.get("modules_to_save")
    if saved:
        names = ", ".join(map(str, saved)) if isinstance(saved, list) else str(saved)
        raise StartupError(
            f"{config.source}: modules_to_save ({names[:128]}) is not supported: whole weights "
            "would replace the base's, of embeddings and head as well"
        )


def _why_strange(names: list[str]) -> str:
    if any("lora_magnitude_vector" in name for name in names):
        return "DoRA is not supported"
    if any("lora_embedding" in name for name in names):
        return "adapters of embeddings are not supported"
    return f"not tensors of a LoRA adapter: {_few(names)}"


def _why_unknown(unknown: list[str], modules: Mapping[str, str], model: ModelSpec) -> str:
    known = {weight.name.removesuffix(".weight") for weight in model.logical_weights}
    present = [module for module in unknown if modules[module] in known]
    if present:
        return (
            "adapters may not change embeddings, head, experts, towers and routers in float32, as "
            f"this one does: {_few(present)}"
        )
    return f"{model.architecture} has no {_few(unknown)}"


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(name[:128] for name in names[:most]) + (", ..." if len(names) > most else "")
