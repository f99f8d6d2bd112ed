"""RMS norm and layer norm in Triton: one program per row, which keeps the row in registers."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs

# Rows of up to this many columns, such as heads, share a program, because a prompt has many such
# rows.
_NARROW = 256
_ELEMENTS = 2048


@triton.jit
def times_weight(unit, weight, ZERO_CENTERED: tl.constexpr):
    """Return a normalised float32 row times its weight, in float32; the caller rounds it."""
    if ZERO_CENTERED:
        product = unit * (1.0 + weight.to(tl.float32))
    else:
        # The row is also rounded before the multiplication, as two separate ops would do.
        product = unit.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)
    return product


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    start_next(PDL)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        old = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
        # The sum is rounded before the norm, which must apply to the values that later layers read.
        x = (x.to(tl.float32) + old.to(tl.float32)).to(old.dtype)
        tl.store(residual_ptr + row + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = times_weight(wide * scale, weight, ZERO_CENTERED)
    tl.store(out_ptr + row + columns, normed.to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def narrow_rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    width,
    eps,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the RMS norm of `ROWS` narrow rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0)
    start_next(PDL)
    wait_for_inputs(PDL)
    cells = rows[:, None] * width + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + cells, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / width + eps)
    normed = times_weight(wide * scale[:, None], weight[None, :], ZERO_CENTERED)
    tl.store(out_ptr + cells, normed.to(x.dtype), mask=inside)


@triton.jit
def _layer_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    start_next(PDL)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        old = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + old.to(tl.float32)).to(old.dtype)
        tl.store(residual_ptr + row + columns, x, mask=inside)
    wide = x.to(tl.float32)
    # Two passes, because the mean may be much larger than the spread.
    centered = tl.where(inside, wide - tl.sum(wide, axis=0) / width, 0.0)
    normed = centered * tl.rsqrt(tl.sum(centered * centered, axis=0) / width + eps) * weight
    if HAS_BIAS:
        normed += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + columns, normed.to(x.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Return the RMS norm of each row; see `kernels.norm.rms_norm`."""
    return _run(x, None, weight, eps, zero_centered)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> Tensor:
    """Add in place and return the sum's norm; see `kernels.norm.fused_add_rms_norm`."""
    return _run(x, residual, weight, eps, zero_centered)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Return the layer norm of each row; see `kernels.norm.layer_norm`."""
    return _run_layer_norm(x, None, weight, bias, eps)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Add in place and return the sum's norm; see `kernels.norm.fused_add_layer_norm`."""
    return _run_layer_norm(x, residual, weight, bias, eps)


def _run(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> Tensor:
    out, num_rows, block = _prepare(x, residual, weight)
    if not num_rows:
        return out
    if residual is None and block <= _NARROW:
        rows = _ELEMENTS // block
        narrow_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x,
            weight,
            out,
            num_rows,
            x.shape[-1],
            eps,
            ZERO_CENTERED=zero_centered,
            ROWS=rows,
            BLOCK=block,
            num_warps=4,
            **launch_options(x.device),
        )
    else:
        _rms_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            out,
            x.shape[-1],
            eps,
            HAS_RESIDUAL=residual is not None,
            ZERO_CENTERED=zero_centered,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **launch_options(x.device),
        )
    return out


def _run_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    out, num_rows, block = _prepare(x, residual, weight)
    if num_rows:
        _layer_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            weight if bias is None else bias,
            out,
            x.shape[-1],
            eps,
            HAS_RESIDUAL=residual is not None,
            HAS_BIAS=bias is not None,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **launch_options(x.device),
        )
    return out


def _prepare(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, int, int]:
    """Return the output tensor, the number of rows, and the columns that a program loads."""
    assert x.is_contiguous()
    assert weight.dtype == x.dtype
    assert residual is None or (residual.is_contiguous() and residual.dtype == x.dtype)
    width = x.shape[-1]
    return torch.empty_like(x), x.numel() // width, triton.next_power_of_2(width)
