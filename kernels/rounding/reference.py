"""Norms and gated activations whose results are rounded in a second step."""

from torch import Tensor

from kernels.activation import Activation, act_and_mul
from kernels.norm import fused_add_rms_norm, rms_norm
from kernels.rounding import RoundedTokens, Rounding, round_to_codes


def rms_norm_rounded(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
    rounding: Rounding,
) -> RoundedTokens:
    """Compute and round a norm; see `kernels.rounding.rms_norm_rounded`."""
    if residual is None:
        normed = rms_norm(x, weight, eps, zero_centered)
    else:
        normed = fused_add_rms_norm(x, residual, weight, eps, zero_centered)
    return RoundedTokens(*round_to_codes(normed, rounding))


def act_and_mul_rounded(x: Tensor, activation: Activation, rounding: Rounding) -> RoundedTokens:
    """Compute and round a gated activation; see `kernels.rounding.act_and_mul_rounded`."""
    return RoundedTokens(*round_to_codes(act_and_mul(x, activation), rounding))
