"""Runs the doctor's checks one after the other; a problem does not stop the later checks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.doctor.findings import Model, Problem, Report
from headrace.doctor.machine import read_libraries, read_machine
from runtime.checkpoint.check import check_model_folder, describe
from runtime.checkpoint.gguf.files import is_gguf
from runtime.checkpoint.model_spec import (
    LatentState,
    ModelSpec,
    PagedState,
    RecurrentState,
    SharedState,
)
from runtime.config.options import ServerConfig
from runtime.errors import StartupError
from runtime.launch.hardware import detect_hardware
from runtime.launch.prepare import find_model
from runtime.launch.resolve import Folders, Resolved, check_options, resolve
from runtime.models.quantization.registry import as_override
from runtime.models.registry import impl_override, read_model_spec
from runtime.text.tokenizer import Tokenizer

_WHOLE_FOLDER = "give --model-path a whole folder in Hugging Face format, or use --config"
_OPTIONS = "change the option that the line names"


def examine(config: ServerConfig, config_file: Path | None = None) -> Report:
    """Examine the machine and a model, and return the report.

    Args:
        config: the server's options; if they name no model, the demo model is examined.
        config_file: a `config.json` to examine instead of a whole model folder; then weights and
            tokenizer are not examined.
    """
    report = Report(read_machine(), read_libraries())
    for library in report.libraries:
        if library.is_required and library.version is None:
            reason = f"{library.name} is not installed: {library.gives}."
            report.problems.append(Problem(reason, library.install))
    spec: ModelSpec | None = None
    resolved: Resolved | None = None
    folder = config_file
    makes_sense = False
    with _noting(report, _OPTIONS):
        check_options(config)
        makes_sense = True
    if config_file is not None and not config_file.exists():
        report.problems.append(Problem(f"{config_file}: no such file.", "check the path"))
        folder = None
    elif folder is None:
        with _noting(report, "give --model-path a folder in Hugging Face format, or a hub id"):
            config, folder = find_model(config, only_config=True)
    if folder is not None:
        with _noting(report, "serve a model of a supported architecture, with a whole config.json"):
            words = as_override(config.model.quantization) | impl_override(config.model.model_impl)
            spec = read_model_spec(folder, words)
    if spec is not None and folder is not None and config_file is None:
        _check_files(report, config, folder, spec)
    if spec is not None and folder is not None and makes_sense:
        with _noting(report, _OPTIONS):
            nowhere = Folders(run=folder, model=folder, tokenizer=folder)
            resolved = resolve(config, spec, detect_hardware(), nowhere, seed=0)
            if resolved.worker.model_overrides != spec.overrides:
                spec = read_model_spec(folder, resolved.worker.model_overrides)
            report.model = _describe(resolved, spec)
    _look_with_torch(report, resolved, spec)
    return report


def _check_files(report: Report, config: ServerConfig, folder: Path, spec: ModelSpec) -> None:
    """Check weights and tokenizer, if they are on this machine."""
    path = config.model.model_path
    if path is None or not (is_gguf(folder) or Path(path).expanduser().is_dir()):
        report.notes.append("Of the hub's files only config.json was examined.")
        return
    if config.model.load_format != "dummy":
        with _noting(report, _WHOLE_FOLDER):
            summary = check_model_folder(folder, spec)
            if summary.unused:
                report.notes.append(f"{describe('unused', summary.unused)}.")
    if not config.model.skip_tokenizer_init and config.model.tokenizer_path is None:
        with _noting(report, _WHOLE_FOLDER):
            Tokenizer.from_folder(folder)


def _describe(resolved: Resolved, spec: ModelSpec) -> Model:
    worker = resolved.worker
    return Model(
        name=resolved.config.model.served_model_name,
        architecture=spec.architecture,
        impl=spec.impl,
        gives=spec.gives,
        num_parameters=spec.num_parameters,
        stored_dtype=spec.dtype if spec.quantization is None else spec.quantization.description,
        layer_states=dict(Counter(map(_state_name, spec.layer_states))),
        device=worker.device,
        dtype=worker.dtype,
        context_len=worker.context_len,
        max_running_requests=worker.max_running_requests,
        tp_size=worker.tp_size,
        dp_size=worker.dp_size,
        # The random seed is omitted, because each start of the server draws another one.
        choices=[line for line in resolved.choices if not line.startswith("random_seed")],
    )


def _state_name(state: object) -> str:
    if isinstance(state, LatentState):
        return f"latents of {state.head_dim}"
    if isinstance(state, PagedState):
        heads = f"{state.num_kv_heads} heads of {state.head_dim}"
        return heads if state.window is None else f"{heads}, window {state.window}"
    if isinstance(state, RecurrentState):
        shapes = (" x ".join(map(str, part.shape)) for part in state.parts)
        return f"a recurrent state of {' and '.join(shapes)}"
    if isinstance(state, SharedState):
        return "the keys of an earlier one"
    return type(state).__name__


def _look_with_torch(report: Report, resolved: Resolved | None, spec: ModelSpec | None) -> None:
    try:
        from headrace.doctor.needs import Estimate, free_memory_bytes
    except ImportError as error:
        if not report.problems:
            report.problems.append(Problem(f"torch cannot be imported: {error}", "reinstall it"))
        return
    report.machine = dataclasses.replace(report.machine, memory_bytes=free_memory_bytes())
    if resolved is None or spec is None:
        return
    estimate = Estimate(resolved.worker, spec)
    report.needs = estimate.needs
    try:
        with _noting(report, "serve it on a machine with more memory, or a smaller model"):
            estimate.size_pool()
        report.needs = estimate.needs
    except RuntimeError as error:
        # This happens, for example, if the GPU driver is too old for torch's libraries.
        reason = f"The device does not work: {' '.join(str(error).split())}"
        report.problems.append(Problem(reason, "repair its driver, or use --device cpu"))
        return
    try:
        report.attention, report.kernels = estimate.choose_kernels()
    except (StartupError, RuntimeError, ImportError) as error:
        remedy = "install what is missing (see the libraries), or choose another --device"
        report.problems.append(Problem(f"The kernels cannot be loaded: {error}", remedy))


@contextmanager
def _noting(report: Report, remedy: str) -> Iterator[None]:
    """Record an error of the block in `report`, with its remedy, and continue after the block."""
    try:
        yield
    except StartupError as error:
        report.problems.append(Problem(error.message, remedy))
