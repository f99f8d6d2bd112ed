"""RMS norm and layer norm in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Return the RMS norm of each row; see `kernels.norm.rms_norm`."""
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if zero_centered:
        return (normalised * (1.0 + weight.float())).to(x.dtype)
    return weight * normalised.to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> Tensor:
    """Add in place and return the sum's norm; see `kernels.norm.fused_add_rms_norm`."""
    residual.add_(x)
    return rms_norm(residual, weight, eps, zero_centered)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the layer norm of each row; see `kernels.norm.layer_norm`."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Add in place and return the sum's norm; see `kernels.norm.fused_add_layer_norm`."""
    residual.add_(x)
    return layer_norm(residual, weight, bias, eps)
