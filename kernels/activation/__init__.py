"""The activation between the two products of a feed-forward block, with or without a gate."""

from collections.abc import Callable
from functools import cache, partial
from typing import Literal, Protocol

from torch import Tensor
from torch.nn import functional

from kernels.table import Entry, Table

__all__ = [
    "ACTIVATION",
    "SWIGLU_ALPHA",
    "SWIGLU_LIMIT",
    "Activation",
    "ActivationKernels",
    "Gate",
    "Unary",
    "act_and_mul",
    "sigmoid_mul",
    "unary",
]

# Activations of a gate: `gelu_tanh` is the approximation of GELU by a hyperbolic tangent.
Activation = Literal["silu", "gelu_tanh"]
# How `gate` and `up` are combined: the activation of `gate` times `up`, or gpt-oss's clamped form,
# `min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (clamp(up, -7, 7) + 1)`.
Gate = Literal[Activation, "swigluoai"]
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
# Activations of feed-forward blocks without a gate. `gelu` is the exact GELU, with the error
# function.
Unary = Literal["gelu", "gelu_tanh", "relu", "relu2", "tanh"]
_UNARY: dict[Unary, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square_(),
    "tanh": functional.tanh,
}


class ActivationKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def act_and_mul(self, x: Tensor, activation: Gate) -> Tensor:
        """Return `activation(gate) * up`; see `kernels.activation.act_and_mul`."""

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        """Return `sigmoid(gate) * x`; see `kernels.activation.sigmoid_mul`."""


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


def unary(x: Tensor, activation: Unary) -> Tensor:
    """Return `activation(x)`, a new tensor.

    It calls torch's own op, and is used after products that cannot fuse the activation.
    """
    return _UNARY[activation](x)


def act_and_mul(x: Tensor, activation: Gate) -> Tensor:
    """Return `activation(gate) * up` for each token; see `Gate` for the formula of `swigluoai`.

    Args:
        x: `[num_tokens, 2 * intermediate_size]`, float16, bfloat16 or float32, contiguous. The
            first half of a row is gate, the second half is up.
        activation: how gate and up are combined.

    Returns:
        A new `[num_tokens, intermediate_size]` tensor, the dtype of `x`. In 16-bit dtypes an
        implementation rounds once or twice; torch's two ops round twice.
    """
    return _kernels(x.device.type).act_and_mul(x, activation)


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x`, rounded once or twice, depending on the implementation.

    Args:
        gate: `[num_tokens, width]`, or `[num_tokens, 1]` for one gate per token; the dtype of `x`.
            The elements of a token are contiguous; tokens may have any stride.
        x: `[num_tokens, width]`, float16, bfloat16 or float32, contiguous.

    Returns:
        A new `[num_tokens, width]` tensor, the dtype of `x`.
    """
    return _kernels(x.device.type).sigmoid_mul(gate, x)
