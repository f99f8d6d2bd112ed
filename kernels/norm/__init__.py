"""RMS norm and layer norm, alone or after an addition to the residual stream."""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = [
    "NORM",
    "NormKernels",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "layer_norm",
    "rms_norm",
]


class NormKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
    ) -> Tensor:
        """Return the RMS norm of each row; see `kernels.norm.rms_norm`."""

    def fused_add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        zero_centered: bool = False,
    ) -> Tensor:
        """Add in place and return the sum's norm; see `kernels.norm.fused_add_rms_norm`."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the layer norm of each row; see `kernels.norm.layer_norm`."""

    def fused_add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Add in place and return the sum's norm; see `kernels.norm.fused_add_layer_norm`."""


NORM: Table[NormKernels] = Table(
    "norm",
    {
        "reference": Entry("kernels.norm.reference"),
        "cpu": Entry("kernels.norm.cpu", probe="kernels.cpu.library:unavailable", invariant=True),
        "triton": Entry(
            "kernels.norm.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cpu": ("cpu",), "cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> NormKernels:
    return NORM.choose(device_type).kernels


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Scale each row of `x` to unit root mean square, then by `weight`.

    The numerics are those of `transformers`. The mean of squares is computed in float32. The
    normalised row is rounded to the dtype of `x` and then multiplied by `weight` in that dtype.
    With `zero_centered`, the row is multiplied by `1 + weight` in float32 and rounded once, as in
    Gemma.

    Args:
        x: `[num_tokens, hidden_size]`, float16, bfloat16 or float32, contiguous.
        weight: `[hidden_size]`, the dtype of `x`.
        eps: number that is added to the mean square.
        zero_centered: whether the factor is `1 + weight` instead of `weight`.

    Returns:
        A new `[num_tokens, hidden_size]` tensor, the dtype of `x`.
    """
    return _kernels(x.device.type).rms_norm(x, weight, eps, zero_centered)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> Tensor:
    """Add `x` to the residual stream in place and return the RMS norm of the sum.

    Args:
        x: `[num_tokens, hidden_size]`, float16, bfloat16 or float32, contiguous; unchanged.
        residual: the residual stream, the shape and dtype of `x`, contiguous. It becomes `residual
            + x`, rounded to its dtype before the norm is computed.
        weight: `[hidden_size]`, the dtype of `x`.
        eps: number that is added to the mean square.
        zero_centered: whether the factor is `1 + weight`; see `rms_norm`.

    Returns:
        A new `[num_tokens, hidden_size]` tensor, the dtype of `x`.
    """
    return _kernels(x.device.type).fused_add_rms_norm(x, residual, weight, eps, zero_centered)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise each row of `x` to mean 0 and variance 1, multiply by `weight` and add `bias`.

    Args:
        x: `[num_tokens, hidden_size]`, float16, bfloat16 or float32, contiguous.
        weight: `[hidden_size]`, the dtype of `x`.
        bias: `[hidden_size]`, the dtype of `x`, or `None`.
        eps: number that is added to the variance, which is computed in float32.

    Returns:
        A new `[num_tokens, hidden_size]` tensor, the dtype of `x`.
    """
    return _kernels(x.device.type).layer_norm(x, weight, bias, eps)


def fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Add `x` to the residual stream in place and return the layer norm of the sum.

    Args:
        x: `[num_tokens, hidden_size]`, float16, bfloat16 or float32, contiguous; unchanged.
        residual: the residual stream, the shape and dtype of `x`, contiguous. It becomes `residual
            + x`, rounded to its dtype before the norm is computed.
        weight: `[hidden_size]`, the dtype of `x`.
        bias: `[hidden_size]`, the dtype of `x`, or `None`.
        eps: number that is added to the variance, which is computed in float32.

    Returns:
        A new `[num_tokens, hidden_size]` tensor, the dtype of `x`.
    """
    return _kernels(x.device.type).fused_add_layer_norm(x, residual, weight, bias, eps)
