"""The gated activation between a feed-forward block's two products."""

from functools import cache
from typing import Literal, Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["ACTIVATION", "Activation", "ActivationKernels", "act_and_mul"]

# What a gate goes through: `gelu_tanh` is the approximation of GELU by a hyperbolic tangent.
Activation = Literal["silu", "gelu_tanh"]


class ActivationKernels(Protocol):
    """What an implementation of this op offers."""

    def act_and_mul(self, x: Tensor, activation: Activation) -> Tensor:
        """See `kernels.activation.act_and_mul`."""


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


def act_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """Return `activation(gate) * up`, row by row.

    Args:
        x: `[num_tokens, 2 * intermediate_size]`, gate first, up second; float16, bfloat16 or
            float32, contiguous.
        activation: of the gate.

    Returns:
        A new `[num_tokens, intermediate_size]` tensor, the dtype of `x`. In 16-bit dtypes the
        result is rounded once more or less than torch's two steps, depending on implementation.
    """
    return _kernels(x.device.type).act_and_mul(x, activation)
