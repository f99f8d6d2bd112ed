"""Gated activations in Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import SWIGLU_ALPHA, SWIGLU_LIMIT, Gate
from kernels.triton_support.launch import launch_options, lets_next_in, start_next, wait_for_inputs

_BLOCK = 1024
_ALPHA = tl.constexpr(SWIGLU_ALPHA)
_LIMIT = tl.constexpr(SWIGLU_LIMIT)


@triton.jit
def activated(gate, ACTIVATION: tl.constexpr):
    """Return the activation of each element of `gate`, in float32."""
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is sigmoid(2 z), so the constant of z is doubled here: 2 sqrt(2 / pi).
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-slope))
    else:
        result = gate / (1.0 + tl.exp(-gate))
    return result


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return `gate` and `up` combined, in float32; see `kernels.activation.Gate`."""
    if ACTIVATION == "swigluoai":
        gate = tl.minimum(gate, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -_LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, _LIMIT, propagate_nan=tl.PropagateNan.ALL)
        result = gate / (1.0 + tl.exp(gate * -_ALPHA)) * (up + 1.0)
    else:
        result = activated(gate, ACTIVATION) * up
    return result


@triton.jit
def _act_and_mul_kernel(
    x_ptr,
    out_ptr,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    start_next(PDL and EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + columns, mask=inside, other=0.0)
    result = gated(gate, up.to(tl.float32), ACTIVATION)
    tl.store(out_ptr + row * width + columns, result.to(up.dtype), mask=inside)


@triton.jit
def sigmoid_mul_kernel(
    gate_ptr,
    x_ptr,
    out_ptr,
    width,
    gate_stride,
    IS_SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a block of a row by the sigmoid of its gates, or of the row's one gate."""
    wait_for_inputs(PDL)
    start_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    if IS_SHARED:
        gate = tl.load(gate_ptr + row * gate_stride).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0)
        gate = gate.to(tl.float32)
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0)
    result = x.to(tl.float32) / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * width + columns, result.to(x.dtype), mask=inside)


def sigmoid_mul(gate: Tensor, x: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x`, rounded once; see `kernels.activation.sigmoid_mul`."""
    assert x.is_contiguous()
    num_tokens, width = x.shape
    out = torch.empty_like(x)
    if out.numel():
        sigmoid_mul_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
            gate,
            x,
            out,
            width,
            gate.stride(0),
            IS_SHARED=gate.shape[1] == 1,
            BLOCK=_BLOCK,
            num_warps=4,
            **launch_options(x.device),
        )
    return out


def act_and_mul(x: Tensor, activation: Gate) -> Tensor:
    """Return `activation(gate) * up`, rounded once; see `kernels.activation.act_and_mul`."""
    assert x.is_contiguous()
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_tokens, width)
    if out.numel():
        grid = (num_tokens, triton.cdiv(width, _BLOCK))
        _act_and_mul_kernel[grid](
            x,
            out,
            width,
            ACTIVATION=activation,
            BLOCK=_BLOCK,
            EARLY=lets_next_in(num_tokens),
            num_warps=4,
            **launch_options(x.device),
        )
    return out
