"""Recognizes errors after which a device cannot be used, so that its process must end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from runtime.errors import DeviceLost
from runtime.executor.out_of_memory import is_out_of_memory

# Messages of CUDA errors after which every later call in the same context fails, too. They are the
# messages of CUDA's driver and runtime, as libraries print them.
_STICKY = (
    "device-side assert triggered",
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "hardware stack error",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "context is destroyed",
    "cudaErrorAssert",
    "cudaErrorIllegalAddress",
    "cudaErrorLaunchFailure",
    "cudaErrorECCUncorrectable",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
    "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_ECC_UNCORRECTABLE",
)
# After these errors of collective operations, the ranks of a step no longer agree on their state.
_COLLECTIVE = ("NCCL error", "NCCL communicator was aborted")


def lost_device(error: BaseException) -> DeviceLost | None:
    """Return the error as `DeviceLost` if the device no longer works; else `None`.

    Running out of memory does not make a device unusable. If the message is unknown, the device is
    tested, because many CUDA errors affect only one launch.
    """
    if isinstance(error, RuntimeError) and not is_out_of_memory(error):
        text = str(error)
        if any(words in text for words in _STICKY):
            return DeviceLost(_line(error))
        of_ranks = isinstance(error, torch.distributed.DistBackendError)
        if of_ranks or any(words in text for words in _COLLECTIVE):
            return DeviceLost(_line(error), by_others=True)
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as broken:
        return None if is_out_of_memory(broken) else DeviceLost(_line(broken))
    return None


@contextmanager
def losing_device() -> Iterator[None]:
    """Context manager: raises `DeviceLost` for errors after which the device no longer works.

    Other errors pass unchanged.

    Raises:
        DeviceLost: the device failed inside the block.
    """
    try:
        yield
    except Exception as error:
        raise_if_lost(error)
        raise


def raise_if_lost(error: Exception) -> None:
    """Raise `DeviceLost` if the device no longer works after `error`.

    Raises:
        DeviceLost: the device no longer works.
    """
    lost = lost_device(error)
    if lost is not None:
        raise lost from error


def _line(error: BaseException) -> str:
    # The message's other lines are advice on debugging.
    words = str(error).strip().splitlines()
    return f"{type(error).__name__}: {words[0] if words else 'no message'}"
