"""Deterministic inference: chooses batch-invariant kernels, and refuses to start without them.

A kernel is batch-invariant if the result for a sequence does not depend on the rest of the batch.
With such kernels, a request's tokens and log-probabilities depend on the request alone. They do not
depend on other requests, on cached prefixes, or on how the prompt is split into chunks. They are
also the same if the request is put back into the queue and computed again. `docs/deterministic.md`
has the guarantees.
"""

from __future__ import annotations

import logging

from kernels.activation import ACTIVATION
from kernels.decode_step import DECODE_STEP
from kernels.embedding import EMBEDDING
from kernels.greedy import GREEDY
from kernels.linear import LINEAR, PackedLinear
from kernels.norm import NORM
from kernels.paged_attention import PAGED_ATTENTION
from kernels.rope import ROPE
from kernels.sampling import SAMPLING
from runtime.errors import StartupError
from runtime.models.attention.backend import INVARIANT_ATTENTION
from runtime.models.layers.embedding import Embedding
from runtime.models.layers.linear import Linear
from runtime.models.model import Model

logger = logging.getLogger(__name__)

OPTION = "--enable-deterministic-inference"
# Ops whose implementation depends only on the device. The implementation that is chosen for the
# device must be batch-invariant.
_FIXED_OPS = (NORM, ROPE, ACTIVATION, EMBEDDING, SAMPLING, DECODE_STEP, GREEDY)


def invariant_linear(device_type: str) -> str:
    """Return the name of the batch-invariant linear kernel for a device, an entry of `LINEAR`.

    Raises:
        StartupError: this machine has no such kernel, or another op has no batch-invariant kernel.
    """
    try:
        chosen = LINEAR.choose(device_type, invariant=True)
    except RuntimeError as error:
        raise StartupError(f"{OPTION}: {error}.") from None
    for table in _FIXED_OPS:
        choice = table.choose(device_type)
        if not table.is_invariant(choice.name):
            raise StartupError(
                f"{OPTION}: {choice.op} would run in its {choice.name!r} implementation, whose "
                f"rows depend on the batch ({choice.reason})."
            )
    return chosen.name


def invariant_attention(backend: str, device_type: str) -> str:
    """Return the name of the batch-invariant form of an attention back end.

    Raises:
        StartupError: the back end has no such form.
    """
    name = INVARIANT_ATTENTION.get(backend)
    if name is None:
        known = ", ".join(INVARIANT_ATTENTION)
        raise StartupError(
            f"{OPTION}: --attention-backend {backend} is not batch-invariant; these are: {known}."
        )
    if name == "cpu" and not PAGED_ATTENTION.is_invariant(PAGED_ATTENTION.choose(device_type).name):
        raise StartupError(f"{OPTION}: {PAGED_ATTENTION.unavailable('cpu')}.")
    return name


def require_invariance(model: Model, linear: str, attention: str) -> None:
    """Check that a loaded model runs with batch-invariant kernels only.

    Args:
        model: the model, whose linear layers were loaded for the kernel `linear`.
        linear: name of the linear kernel, from `invariant_linear`.
        attention: name of the attention back end, from `invariant_attention`.

    Raises:
        StartupError: a linear layer or an attention head size has no batch-invariant kernel; the
            message names the first one.
    """
    for name, holder in model.holders():
        packed: PackedLinear | None = None
        if isinstance(holder, Linear):
            packed = holder.packed
        elif isinstance(holder, Embedding):
            packed = holder.head
        if packed is not None and packed.implementation != linear:
            raise StartupError(
                f"{OPTION}: {name}, {packed.in_features} columns of {_dtype(model)}, has no "
                f"{linear!r} product; use bfloat16 or float32."
            )
    if attention == "cpu":
        from kernels.paged_attention.cpu import supports

        for head_dim in sorted(model.spec.head_dims):
            if not supports(model.context.dtype, head_dim):
                raise StartupError(
                    f"{OPTION}: heads of {head_dim} in {_dtype(model)} have no batch-invariant "
                    "attention on the CPU."
                )
    logger.info(
        "Deterministic inference: %s linears, %s attention, sums over ranks in order; "
        "a request's result does not depend on its batch",
        linear,
        attention,
    )


def _dtype(model: Model) -> str:
    return str(model.context.dtype).removeprefix("torch.")
