"""Gated activations in the C++ library; float16 and `swigluoai` use the reference."""

import torch
from torch import Tensor

from kernels.activation import Gate, reference
from kernels.cpu.library import DTYPES, library

_act_and_mul = library().hr_act_and_mul
_sigmoid_mul = library().hr_sigmoid_mul


def act_and_mul(x: Tensor, activation: Gate) -> Tensor:
    """Return `activation(gate) * up`; see `kernels.activation.act_and_mul`."""
    dtype = x.dtype
    if dtype not in DTYPES or activation == "swigluoai":
        return reference.act_and_mul(x, activation)
    assert x.is_contiguous()
    tokens, width = x.shape
    out = x.new_empty(tokens, width // 2)
    _act_and_mul(
        dtype is torch.bfloat16,
        activation == "gelu_tanh",
        x.data_ptr(),
        out.data_ptr(),
        tokens,
        width // 2,
        torch.get_num_threads(),
    )
    return out


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x`; see `kernels.activation.sigmoid_mul`."""
    if x.dtype not in DTYPES:
        return reference.sigmoid_mul(gate, x)
    assert x.is_contiguous()
    assert gate.dtype is x.dtype
    assert gate.stride(1) == 1 or gate.shape[1] == 1
    tokens, width = x.shape
    assert gate.shape in ((tokens, 1), (tokens, width))
    out = torch.empty_like(x)
    _sigmoid_mul(
        x.dtype is torch.bfloat16,
        gate.data_ptr(),
        gate.stride(0),
        gate.shape[1] == 1,
        x.data_ptr(),
        out.data_ptr(),
        tokens,
        width,
        torch.get_num_threads(),
    )
    return out
