"""RMS norm and layer norm in the C++ library; float16 uses the reference."""

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, library
from kernels.norm import reference

_rms_norm = library().hr_rms_norm
_layer_norm = library().hr_layer_norm


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Return the RMS norm of each row; see `kernels.norm.rms_norm`."""
    return _run(x, None, weight, eps, zero_centered)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> Tensor:
    """Add in place and return the sum's norm; see `kernels.norm.fused_add_rms_norm`."""
    return _run(x, residual, weight, eps, zero_centered)


def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> Tensor:
    dtype = x.dtype
    if dtype not in DTYPES:
        if residual is None:
            return reference.rms_norm(x, weight, eps, zero_centered)
        return reference.fused_add_rms_norm(x, residual, weight, eps, zero_centered)
    assert x.is_contiguous()
    assert weight.dtype == dtype
    assert residual is None or (residual.is_contiguous() and residual.dtype == dtype)
    out = torch.empty_like(x)
    width = x.shape[-1]
    _rms_norm(
        dtype is torch.bfloat16,
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.numel() // width,
        width,
        eps,
        zero_centered,
        torch.get_num_threads(),
    )
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the layer norm of each row; see `kernels.norm.layer_norm`."""
    return _run_layer_norm(x, None, weight, bias, eps)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Add in place and return the sum's norm; see `kernels.norm.fused_add_layer_norm`."""
    return _run_layer_norm(x, residual, weight, bias, eps)


def _run_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    dtype = x.dtype
    if dtype not in DTYPES:
        if residual is None:
            return reference.layer_norm(x, weight, bias, eps)
        return reference.fused_add_layer_norm(x, residual, weight, bias, eps)
    assert x.is_contiguous()
    assert weight.dtype == dtype
    assert bias is None or bias.dtype == dtype
    assert residual is None or (residual.is_contiguous() and residual.dtype == dtype)
    out = torch.empty_like(x)
    width = x.shape[-1]
    _layer_norm(
        dtype is torch.bfloat16,
        x.data_ptr(),
        None if residual is None else residual.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        x.numel() // width,
        width,
        eps,
        torch.get_num_threads(),
    )
    return out
