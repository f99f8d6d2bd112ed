"""Chooses the kernel implementation of each op, and logs the choices with their reasons."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kernels.activation import ACTIVATION
from kernels.decode_step import DECODE_STEP
from kernels.embedding import EMBEDDING
from kernels.experts import EXPERTS
from kernels.greedy import GREEDY
from kernels.linear import LINEAR
from kernels.norm import NORM
from kernels.sampling import SAMPLING
from kernels.table import Choice, Table
from runtime.config.options import WorkerConfig
from runtime.executor.invariance import invariant_attention, invariant_linear
from runtime.models.attention.backend import (
    DEFAULT_ATTENTION,
    DEFAULT_REASONS,
    AttentionBackend,
)

# The entry of `LINEAR` that multiplies float32 matrices in bfloat16.
_ROUNDED = "cpu_bf16"

logger = logging.getLogger(__name__)

_EXPERTS_BACKENDS = {"auto": None, "torch": "grouped", "triton": "triton"}
# Ops whose implementation depends only on the device. The attention back end chooses its own ops.
_TABLES: tuple[Table[Any], ...] = (NORM, ACTIVATION, EMBEDDING, SAMPLING, GREEDY, DECODE_STEP)


def choose_attention(config: WorkerConfig, device_type: str) -> tuple[str, str | None]:
    """Choose the attention back end and, if the options require certain ones, the linear kernels.

    Returns:
        The attention back end, a name in `ATTENTION_BACKENDS`. And the linear kernels, a name in
        `kernels.linear.LINEAR`, or `None` for the best ones of the device. The kernels that
        multiply float32 in bfloat16 are batch-invariant as well.

    Raises:
        StartupError: batch-invariant kernels were requested, but this machine has none.
    """
    backend = config.attention_backend
    if backend == "auto":
        backend = DEFAULT_ATTENTION[device_type]
    rounded = _ROUNDED if rounds_products(config, device_type) else None
    if not config.deterministic:
        return backend, rounded
    linear = rounded or invariant_linear(device_type)
    return invariant_attention(backend, device_type), linear


def rounds_products(config: WorkerConfig, device_type: str) -> bool:
    """Whether float32 matrices are multiplied in bfloat16.

    True if the user asked for it and this CPU has such kernels.
    """
    asked = config.rounds_products and config.dtype == "float32" and device_type == "cpu"
    return asked and LINEAR.unavailable(_ROUNDED) is None


def choose_experts(config: WorkerConfig, device_type: str) -> str | None:
    """Choose the kernels for mixture-of-experts layers.

    Returns:
        A name in `EXPERTS`, or `None` for the best kernels of the device.

    Raises:
        RuntimeError: the requested kernels cannot run on this machine.
    """
    if config.deterministic:
        return EXPERTS.choose(device_type, invariant=True).name
    wanted = _EXPERTS_BACKENDS[config.moe_runner_backend]
    return None if wanted is None else EXPERTS.choose(device_type, wanted).name


def attention_reason(config: WorkerConfig, device_type: str) -> str:
    """Return why `choose_attention` chooses its attention back end, in a few words for the log."""
    if config.deterministic:
        return "batch-invariant"
    return DEFAULT_REASONS[device_type] if config.attention_backend == "auto" else "asked for"


def choose_kernels(
    device_type: str, attention: AttentionBackend, config: WorkerConfig
) -> list[Choice[Any]]:
    """Return the implementation of each op on a device, with the reason for it."""
    linear = LINEAR.choose(device_type, invariant=config.deterministic)
    if rounds_products(config, device_type):
        linear = LINEAR.choose(device_type, _ROUNDED)
    choices = [*attention.choices, linear]
    return choices + [table.choose(device_type) for table in _TABLES]


def log_kernels(
    device_type: str, attention: AttentionBackend, backend: str, config: WorkerConfig
) -> None:
    """Log which kernel implementations run on a device, and why.

    Args:
        device_type: `cpu` or `cuda`.
        attention: the attention back end in use.
        backend: name of this back end.
        config: the worker's configuration.
    """
    why = attention_reason(config, device_type)
    choices = choose_kernels(device_type, attention, config)
    logger.info("Kernels: attention by %s (%s); %s", backend, why, "; ".join(_grouped(choices)))


def _grouped(choices: Iterable[Choice[Any]]) -> list[str]:
    """Return lines of the form `op, op by name (reason)`; ops with equal choices share a line."""
    ops: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        ops.setdefault((choice.name, choice.reason), []).append(choice.op)
    return [f"{', '.join(names)} by {name} ({why})" for (name, why), names in ops.items()]
