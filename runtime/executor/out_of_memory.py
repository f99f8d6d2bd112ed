"""Turns out-of-memory errors at start-up into one line that names the option to lower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runtime.checkpoint.model_spec import ModelSpec
from runtime.errors import StartupError
from runtime.executor.memory import GIB, available_memory_bytes
from runtime.models.layers.build_context import BuildContext

# The text in `StepResult.failed` for a sequence whose step ran out of memory.
STEP_OUT_OF_MEMORY = f"Internal error: {torch.OutOfMemoryError.__name__}"

# Parts of messages of out-of-memory errors that have no type of their own. They come from the CPU's
# allocator, from CUDA and its driver (also when Triton loads a kernel), and from libraries.
_NO_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)

# The advice if the weights do not fit.
TOO_LARGE = (
    "the model is too large for it; share it with --tp-size or --pp-size, store it in 16 bits "
    "(--dtype bfloat16), or free memory"
)


def least_weight_bytes(spec: ModelSpec, context: BuildContext) -> int:
    """Return the least memory that a rank's weights can need, before they are read.

    They may need more: each rank has the whole embeddings, and the device's kernels may need a
    copy in another layout.
    """
    num_ranks = context.tp_size * context.stage.count
    return spec.weight_bytes(context.dtype.itemsize, context.device.type) // num_ranks


def require_room(spec: ModelSpec, context: BuildContext) -> None:
    """Check that the weights can fit into memory, before reading them.

    Raises:
        StartupError: this rank's weights are larger than the free memory of its device.
    """
    needed = least_weight_bytes(spec, context)
    device = context.device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = available_memory_bytes(with_swap=True)
    if needed > free:
        dtype = str(context.dtype).removeprefix("torch.")
        raise StartupError(
            f"The weights take {needed / GIB:.1f} GiB in {dtype} and {device} has "
            f"{free / GIB:.1f} GiB free: {TOO_LARGE}."
        )


@contextmanager
def memory_for(what: str, advice: str, device: torch.device) -> Iterator[None]:
    """Context manager for a part of the start-up: if memory runs out, raises a one-line error.

    Args:
        what: name of the part, such as "the weights".
        advice: what the operator can do, with the names of options.
        device: the device whose memory is used.

    Raises:
        StartupError: there was too little memory.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise StartupError(f"Out of memory for {what}{_left(device)}: {advice}.") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory could not be allocated."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def step_failure(error: BaseException) -> str:
    """Return a text for clients about an error in a step, without the error's own message."""
    return (
        STEP_OUT_OF_MEMORY if is_out_of_memory(error) else f"Internal error: {type(error).__name__}"
    )


def _left(device: torch.device) -> str:
    if device.type != "cuda":
        return f" ({available_memory_bytes() / GIB:.2f} GiB free)"
    try:
        free, total = torch.cuda.mem_get_info(device)
        ours = torch.cuda.memory_reserved(device)
    except RuntimeError:
        # A broken CUDA context does not answer. The original error must be reported nevertheless.
        return ""
    others = total - free - ours
    return (
        f" ({device} has {total / GIB:.1f} GiB: {ours / GIB:.1f} are this process's tensors, "
        f"{others / GIB:.1f} other processes' and libraries', {free / GIB:.1f} free)"
    )
