"""Whether Triton kernels can run in this process, and the device's resources for them."""

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch

# Interpreted kernels (TRITON_INTERPRET=1) run on the CPU; they assume a small device.
_INTERPRETED_MULTIPROCESSORS = 4

# Bytes for barriers and for buffers of reductions, in addition to the blocks of a product.
_RESERVED_BYTES = 1024


@dataclass(frozen=True)
class SharedMemory:
    """The memory that the threads of one program share.

    Attributes:
        size: bytes available to a program.
        is_operand: whether matrix instructions read their operands from this memory while they run.
            The loads of the next block then need another buffer. On other devices operands go
            through registers, and one buffer less is needed.
    """

    size: int
    is_operand: bool

    @classmethod
    def of_capability(cls, size: int, major: int) -> "SharedMemory":
        """Return the memory of a device of compute capability `major`.

        For the capabilities 9 and 10, `is_operand` is set.
        """
        return cls(size, major in (9, 10))

    def stages(self, wanted: int, block_bytes: int) -> int:
        """Return how many blocks of a product's operands may be in flight, at most `wanted`."""
        held = (self.size - _RESERVED_BYTES) // block_bytes
        return max(1, min(wanted, held if self.is_operand else held + 1))


def interpreted() -> bool:
    """Return whether Triton runs its kernels in Python on the CPU (`TRITON_INTERPRET=1`)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def unavailable() -> str | None:
    """Return why the `triton` implementations cannot run here, or `None` if they can."""
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


@cache
def shared_memory(device: torch.device) -> SharedMemory:
    """Return a program's shared memory on a device; interpreted kernels get Hopper's size."""
    if device.type != "cuda":
        return SharedMemory(227 * 1024, is_operand=True)
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    # The size is read from Triton's driver, which refuses larger sizes. torch reports only the
    # default limit.
    size = driver.active.utils.get_device_properties(index)["max_shared_mem"]
    return SharedMemory.of_capability(size, torch.cuda.get_device_capability(device)[0])
