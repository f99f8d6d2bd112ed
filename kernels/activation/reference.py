"""Gated activations in plain torch."""

from torch import Tensor
from torch.nn import functional

from kernels.activation import Activation


def act_and_mul(x: Tensor, activation: Activation) -> Tensor:
    """Return `activation(gate) * up`; see `kernels.activation.act_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    return functional.silu(gate) * up
