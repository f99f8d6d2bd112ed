"""The gated activation between a feed-forward block's two products."""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["ACTIVATION", "ActivationKernels", "silu_and_mul"]


class ActivationKernels(Protocol):
    """What an implementation of this op offers."""

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `kernels.activation.silu_and_mul`."""


ACTIVATION: Table[ActivationKernels] = Table(
    "activation",
    {
        "reference": Entry("kernels.activation.reference"),
        "cpu": Entry(
            "kernels.activation.cpu", probe="kernels.cpu.library:unavailable", invariant=True
        ),
        "triton": Entry(
            "kernels.activation.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cpu": ("cpu",), "cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> ActivationKernels:
    return ACTIVATION.choose(device_type).kernels


def silu_and_mul(x: Tensor) -> Tensor:
    """Return `silu(gate) * up`, row by row.

    Args:
        x: `[num_tokens, 2 * intermediate_size]`, gate first, up second; float16, bfloat16 or
            float32, contiguous.

    Returns:
        A new `[num_tokens, intermediate_size]` tensor, the dtype of `x`. In 16-bit dtypes the
        result is rounded once more or less than torch's two steps, depending on implementation.
    """
    return _kernels(x.device.type).silu_and_mul(x)
