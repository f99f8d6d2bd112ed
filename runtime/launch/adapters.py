"""Checks the LoRA adapters of the command line, before any process starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.peft_adapter import MAX_RANK, AdapterSpec, read_adapter, target_modules
from runtime.checkpoint.weight_roots import AdapterRoots
from runtime.config.lora_options import LoraArgs, LoraLimits
from runtime.config.options import ServerConfig
from runtime.errors import InvalidRequest, StartupError
from runtime.launch.defaults import Choices
from runtime.weights.adapter_control import check_name

_DEFAULT_RANK = 64
_MAX_SLOTS = 1024
_ANYWHERE = AdapterRoots(None)


class _GivenJson(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    pinned: bool = False


@dataclass(frozen=True)
class GivenAdapter:
    """An adapter from `--lora-paths` whose files were checked.

    Attributes:
        name: name by which requests choose the adapter.
        path: the path as given.
        folder: the adapter's folder.
        pinned: whether the adapter always stays on the device.
        spec: the adapter's matrices and rank.
    """

    name: str
    path: str
    folder: Path
    pinned: bool
    spec: AdapterSpec


@dataclass(frozen=True)
class GivenAdapters:
    """The options about LoRA adapters, checked.

    Attributes:
        limits: limits on adapters; `None` if the server takes no adapters.
        adapters: the adapters to load at the start.
        reason: why the largest rank was chosen, for the log.
    """

    limits: LoraLimits | None
    adapters: Sequence[GivenAdapter] = ()
    reason: str = ""

    def settle(self, config: ServerConfig, device: str, choices: Choices) -> LoraArgs:
        """Return the LoRA options with all automatic choices made.

        Args:
            config: all options of the server.
            device: `cpu` or `cuda`.
            choices: receives the choices with their reasons.

        Raises:
            StartupError: the options cannot be satisfied on this device.
        """
        args = config.lora
        if self.limits is None:
            return args
        if device == "cuda" and config.kernels.enable_deterministic_inference:
            raise StartupError(
                "--enable-lora: adapters have no batch-invariant kernels on a GPU; omit "
                "--enable-deterministic-inference."
            )
        return dataclasses.replace(
            args,
            enable_lora=True,
            max_lora_rank=choices.pick("max_lora_rank", self.limits.max_rank, self.reason),
            lora_target_modules=self.limits.target_modules,
        )


def read_adapters(args: LoraArgs, model: ModelSpec) -> GivenAdapters:
    """Check the LoRA options, and the adapters' folders that they name.

    Raises:
        StartupError: the first error; the message is one line.
    """
    if not (args.enable_lora or args.lora_paths):
        return GivenAdapters(None)
    if model.gives != "tokens":
        raise StartupError("--enable-lora: only models that generate text take adapters.")
    if model.impl != "headrace":
        raise StartupError(
            f"--enable-lora: {model.architecture} runs by its own code in transformers, and takes "
            "no adapters."
        )
    _check_bounds(args)
    targets = target_modules(model, args.lora_target_modules)
    given = [_parse(text) for text in args.lora_paths]
    names = [name for name, _, _ in given]
    for name in names:
        if names.count(name) > 1:
            raise StartupError(f"--lora-paths: {name!r} is named twice.")
    most = args.max_lora_rank or MAX_RANK
    adapters = []
    for name, path, pinned in given:
        folder = _ANYWHERE.find(path)
        adapters.append(
            GivenAdapter(name, path, folder, pinned, _read(folder, model, most, targets))
        )
    if sum(each.pinned for each in adapters) >= args.max_loras_per_batch:
        raise StartupError(
            "--lora-paths: fewer adapters than --max-loras-per-batch may be pinned, so that others "
            "can run."
        )
    rank, reason = args.max_lora_rank, "as given"
    if rank is None and adapters:
        rank, reason = max(each.spec.rank for each in adapters), "the largest of --lora-paths"
    elif rank is None:
        rank, reason = _DEFAULT_RANK, "default"
    limits = LoraLimits(
        max_per_batch=args.max_loras_per_batch,
        max_rank=rank,
        target_modules=targets,
        evicts_oldest=args.lora_eviction_policy == "fifo",
    )
    return GivenAdapters(limits, adapters, reason)


def _read(folder: Path, model: ModelSpec, most: int, targets: Sequence[str]) -> AdapterSpec:
    try:
        return read_adapter(folder, model, most, targets)
    except StartupError as error:
        raise StartupError(f"--lora-paths: {error.message}") from error


def _check_bounds(args: LoraArgs) -> None:
    for name, value, most in (
        ("--max-loras-per-batch", args.max_loras_per_batch, _MAX_SLOTS),
        ("--max-lora-rank", args.max_lora_rank, MAX_RANK),
    ):
        if value is not None and not 1 <= value <= most:
            raise StartupError(f"{name} must be from 1 to {most}, got {value}.")
    loaded = args.max_loaded_loras
    least = max(args.max_loras_per_batch, len(args.lora_paths))
    if loaded is not None and loaded < least:
        raise StartupError(
            f"--max-loaded-loras {loaded} is less than {least}: --max-loras-per-batch and the "
            "number of --lora-paths need as many."
        )


def _parse(text: str) -> tuple[str, str, bool]:
    """Return name and path of an adapter, and whether it is pinned.

    Args:
        text: a value of `--lora-paths`: `NAME=DIR`, `DIR`, or JSON.

    Raises:
        StartupError: the text has another form.
    """
    try:
        if text.lstrip().startswith("{"):
            given = msgspec.json.decode(text.encode(), type=_GivenJson)
            name, path, pinned = given.lora_name, given.lora_path, given.pinned
        else:
            before, has_name, after = text.partition("=")
            path, pinned = (after if has_name else text), False
            name = before if has_name else Path(text).name
        check_name(name)
    except (msgspec.DecodeError, InvalidRequest) as error:
        raise StartupError(
            f"--lora-paths {text[:128]!r}: expected NAME=DIR, DIR or JSON with lora_name and "
            f"lora_path ({error})"
        ) from error
    return name, path, pinned
