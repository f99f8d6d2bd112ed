"""Whether Triton kernels can run in this process, and on how many multiprocessors."""

import importlib.util
from functools import cache

import torch

# Interpreted kernels (TRITON_INTERPRET=1) run on the CPU; they pretend to a small device.
_INTERPRETED_MULTIPROCESSORS = 4


def interpreted() -> bool:
    """Return whether Triton runs its kernels in Python on the CPU (`TRITON_INTERPRET=1`)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def unavailable() -> str | None:
    """Return why the `triton` implementations cannot run here, or None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not torch.cuda.is_available() and not interpreted():
        return "no CUDA device"
    return None


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
