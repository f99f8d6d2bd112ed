"""Rounding to 8-bit codes on a GPU, alone or at the end of a norm or a gated activation."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import Activation
from kernels.activation.triton import activated
from kernels.norm.triton import times_weight
from kernels.rounding import RoundedTokens, Rounding
from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs

# Columns of a program, if scales do not need the whole token.
_BLOCK = 2048


@triton.jit
def _scale(largest, TYPE: tl.constexpr):
    """Return the scale of numbers whose largest magnitude is `largest`."""
    most: tl.constexpr = 127.0 if tl.int8 == TYPE else 448.0
    return tl.maximum(largest / most, 1e-12)


@triton.jit
def _codes(x, scale, TYPE: tl.constexpr):
    if tl.int8 == TYPE:
        code = tl.minimum(tl.maximum(x / scale, -127.0), 127.0)
        # The sum has no bits below one, so it rounds to the nearest whole number, ties to even.
        result = ((code + 12582912.0) - 12582912.0).to(TYPE)
    else:
        result = tl.minimum(tl.maximum(x / scale, -448.0), 448.0).to(TYPE)
    return result


@triton.jit
def _store_rounded(
    x,
    columns,
    width,
    first_group,
    static_ptr,
    code_ptr,
    scale_ptr,
    token,
    num_tokens,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
):
    """Round `x`, `[BLOCK]` float32 with zeros beyond `width`, and store codes and scales."""
    kind: tl.constexpr = code_ptr.dtype.element_ty
    if GROUP == 0:
        scale = tl.load(static_ptr) if STATIC else _scale(tl.max(tl.abs(x), axis=0), kind)
        codes = _codes(x, scale, kind)
        tl.store(scale_ptr + token, scale)
    else:
        parts = tl.reshape(x, [BLOCK // GROUP, GROUP])
        if STATIC:
            scales = tl.zeros([BLOCK // GROUP], tl.float32) + tl.load(static_ptr)
        else:
            scales = _scale(tl.max(tl.abs(parts), axis=1), kind)
        codes = tl.reshape(_codes(parts, scales[:, None], kind), [BLOCK])
        group = first_group + tl.arange(0, BLOCK // GROUP)
        tl.store(scale_ptr + group * num_tokens + token, scales, mask=group < tl.cdiv(width, GROUP))
    tl.store(code_ptr + token * width + columns, codes, mask=columns < width)


@triton.jit
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    static_ptr,
    code_ptr,
    scale_ptr,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = token * width
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    start_next(PDL)
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + row + columns, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        old = tl.load(residual_ptr + row + columns, mask=inside, other=0.0)
        # The sum is rounded, as in the norm that does not round to codes.
        x = (x.to(tl.float32) + old.to(tl.float32)).to(old.dtype)
        tl.store(residual_ptr + row + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = times_weight(wide * scale, weight, ZERO_CENTERED).to(x.dtype).to(tl.float32)
    _store_rounded(
        normed,
        columns,
        width,
        0,
        static_ptr,
        code_ptr,
        scale_ptr,
        token,
        tl.num_programs(0),
        BLOCK,
        GROUP,
        STATIC,
    )


@triton.jit
def _gate_kernel(
    x_ptr,
    static_ptr,
    code_ptr,
    scale_ptr,
    width,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + token * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * 2 * width + width + columns, mask=inside, other=0.0)
    result = (activated(gate, ACTIVATION) * up.to(tl.float32)).to(up.dtype).to(tl.float32)
    first_group = 0
    if GROUP > 0:
        first_group = tl.program_id(1) * (BLOCK // GROUP)
    _store_rounded(
        result,
        columns,
        width,
        first_group,
        static_ptr,
        code_ptr,
        scale_ptr,
        token,
        tl.num_programs(0),
        BLOCK,
        GROUP,
        STATIC,
    )


@triton.jit
def _round_kernel(
    x_ptr,
    static_ptr,
    code_ptr,
    scale_ptr,
    in_features,
    num_groups,
    width,
    GROUPS: tl.constexpr,
    SPACE: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    start_next(PDL)
    wait_for_inputs(PDL)
    within = tl.arange(0, SPACE)
    column = group[:, None] * width + within[None, :]
    inside = (column < in_features) & (within < width)[None, :]
    x = tl.load(x_ptr + token * in_features + column, mask=inside, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(static_ptr)
    else:
        scale = _scale(tl.max(tl.abs(x), axis=1), code_ptr.dtype.element_ty)
    codes = _codes(x, scale[:, None], code_ptr.dtype.element_ty)
    tl.store(code_ptr + token * in_features + column, codes, mask=inside)
    tl.store(scale_ptr + group * tl.num_programs(0) + token, scale, mask=group < num_groups)


def round_tokens(x: Tensor, rounding: Rounding) -> RoundedTokens:
    """Round contiguous activations `x`; see `kernels.rounding.round_to_codes`."""
    num_tokens, in_features = x.shape
    groups = triton.cdiv(in_features, rounding.group) if rounding.group else 1
    codes, scales = _empty(num_tokens, in_features, groups, x.device, rounding.codes)
    # A program has about 4096 columns, in whole groups.
    of_program = min(32, triton.next_power_of_2(groups))
    _round_kernel[(num_tokens, triton.cdiv(groups, of_program))](
        x,
        scales if rounding.scale is None else rounding.scale,
        codes,
        scales,
        in_features,
        groups,
        rounding.group or in_features,
        GROUPS=of_program,
        SPACE=triton.next_power_of_2(rounding.group or in_features),
        STATIC=rounding.scale is not None,
        num_warps=8,
        **launch_options(x.device),
    )
    return RoundedTokens(codes, scales.t())


def _empty(
    num_tokens: int, width: int, groups: int, device: torch.device, codes: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Allocate codes and scales.

    The scales are `[groups, num_tokens]` in memory, because kernels read the scales of one group
    together.
    """
    return (
        torch.empty(num_tokens, width, dtype=codes, device=device),
        torch.empty(groups, num_tokens, dtype=torch.float32, device=device),
    )


def rms_norm_rounded(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
) -> RoundedTokens:
    """Compute and round a norm in one launch; see `kernels.rounding.rms_norm_rounded`."""
    assert x.is_contiguous()
    assert residual is None or residual.is_contiguous()
    num_tokens, width = x.shape
    groups = triton.cdiv(width, rounding.group) if rounding.group else 1
    codes, scales = _empty(num_tokens, width, groups, x.device, rounding.codes)
    block = max(triton.next_power_of_2(width), rounding.group)
    if num_tokens:
        _norm_kernel[(num_tokens,)](
            x,
            x if residual is None else residual,
            weight,
            scales if rounding.scale is None else rounding.scale,
            codes,
            scales,
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            ZERO_CENTERED=zero_centered,
            BLOCK=block,
            GROUP=rounding.group,
            STATIC=rounding.scale is not None,
            num_warps=min(16, max(1, block // 512)),
            **launch_options(x.device),
        )
    return RoundedTokens(codes, scales.t())


def act_and_mul_rounded(x: Tensor, activation: Activation, rounding: Rounding) -> RoundedTokens:
    """Compute and round a gated activation; see `kernels.rounding.act_and_mul_rounded`."""
    assert x.is_contiguous()
    num_tokens, width = x.shape[0], x.shape[1] // 2
    groups = triton.cdiv(width, rounding.group) if rounding.group else 1
    codes, scales = _empty(num_tokens, width, groups, x.device, rounding.codes)
    block = _BLOCK if rounding.group else triton.next_power_of_2(width)
    if num_tokens:
        _gate_kernel[(num_tokens, triton.cdiv(width, block))](
            x,
            scales if rounding.scale is None else rounding.scale,
            codes,
            scales,
            width,
            ACTIVATION=activation,
            BLOCK=block,
            GROUP=rounding.group,
            STATIC=rounding.scale is not None,
            num_warps=min(16, max(4, block // 1024)),
            **launch_options(x.device),
        )
    return RoundedTokens(codes, scales.t())
