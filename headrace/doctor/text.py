"""Formats the doctor's report for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from headrace.doctor.findings import Kernel, Machine, Model, Needs, Report

_GIB = 1 << 30


def to_text(report: Report) -> str:
    """Format the whole report, one fact per line. Problems that prevent a start come last."""
    sections = [("Machine", _machine(report.machine)), ("Libraries", _libraries(report))]
    if report.model is not None:
        sections.append(("Model", _model(report.model)))
    if report.model is not None and report.needs is not None:
        sections.append(("Memory", _needs(report.model, report.needs)))
    if report.attention is not None:
        sections.append(("Kernels", _kernels([report.attention, *report.kernels])))
    lines = [line for title, rows in sections for line in (title, *_columns(rows), "")]
    lines += report.notes
    for problem in report.problems:
        lines += [f"Problem: {problem.reason}", f"  Remedy: {problem.remedy}"]
    if not report.problems:
        lines.append("The server can start.")
    return "\n".join(lines)


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    listed = list(rows)
    width = max(len(name) for name, _ in listed)
    return [f"  {name:<{width}}  {value}" for name, value in listed]


def _machine(machine: Machine) -> Iterator[tuple[str, str]]:
    sets = ", ".join(machine.instruction_sets) or "none that the kernels have code for"
    yield "headrace", f"{machine.headrace}, Python {machine.python}, {machine.system}"
    yield "CPU", f"{machine.cpu}, {machine.num_cores} cores to use"
    yield "instruction sets", sets
    if machine.memory_bytes is not None:
        yield "memory", f"{machine.memory_bytes / _GIB:.1f} GiB free"
    yield "GPUs", "; ".join(machine.gpus) or "none"


def _libraries(report: Report) -> Iterator[tuple[str, str]]:
    for library in report.libraries:
        if library.version is not None:
            yield library.name, library.version
        else:
            yield library.name, f"missing: {library.gives} ({library.install})"


def _model(model: Model) -> Iterator[tuple[str, str]]:
    if model.name:
        yield "name", model.name
    by = "" if model.impl == "headrace" else ", by its own code in transformers (--model-impl)"
    yield "architecture", f"{model.architecture}, gives {model.gives}{by}"
    yield "parameters", f"{model.num_parameters:,} stored as {model.stored_dtype}"
    states = "; ".join(f"{count} layers with {what}" for what, count in model.layer_states.items())
    yield "kept between steps", states
    ranks = f", tp {model.tp_size}, dp {model.dp_size}" if model.tp_size * model.dp_size > 1 else ""
    yield "would run", f"{model.dtype} on {model.device}{ranks}"
    yield "context", f"{model.context_len:,} tokens"
    for choice in model.choices:
        yield "chosen", choice


def _needs(model: Model, needs: Needs) -> Iterator[tuple[str, str]]:
    each = " on each rank" if model.tp_size > 1 else ""
    least = f"{needs.weight_bytes / _GIB:.2f} GiB at least"
    yield "weights", f"{least}, {needs.weight_bytes:,} bytes{each}"
    yield "a token", f"{needs.bytes_per_token:,} bytes in the pool{each}"
    if needs.pool is None:
        return
    pool = needs.pool
    most = ", minus what the largest step is measured to need" if pool.is_at_most else ""
    yield (
        "pool",
        (
            f"{pool.num_tokens:,} tokens = {pool.num_pages:,} pages of {pool.page_size}, "
            f"{pool.size_bytes / _GIB:.2f} GiB{most}"
        ),
    )
    yield "arithmetic", f"{pool.arithmetic} GiB"
    yield "longest request", f"{needs.longest_request:,} tokens, prompt and output"
    of_each = " on each replica" if model.dp_size > 1 else ""
    for capacity in needs.capacities:
        what = f"requests of {capacity.num_tokens:,}"
        why = (
            ""
            if capacity.num_requests < model.max_running_requests
            else " (--max-running-requests)"
        )
        yield what, f"{capacity.num_requests:,} at a time{of_each}{why}"


def _kernels(kernels: list[Kernel]) -> Iterator[tuple[str, str]]:
    for kernel in kernels:
        yield kernel.op, f"{kernel.implementation} ({kernel.reason})"
