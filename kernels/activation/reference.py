"""Gated activations in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Gate


def act_and_mul(x: Tensor, activation: Gate) -> Tensor:
    """Return `activation(gate) * up`; see `kernels.activation.act_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    if activation == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    if activation == "swigluoai":
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)
    return functional.silu(gate) * up


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x`; see `kernels.activation.sigmoid_mul`."""
    return torch.sigmoid(gate) * x
