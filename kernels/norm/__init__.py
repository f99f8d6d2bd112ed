"""RMS and layer normalization, alone or after a residual add."""

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
    """The functions of an implementation of this op."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
    ) -> Tensor:
        """See `kernels.norm.rms_norm`."""

    def fused_add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        zero_centered: bool = False,
    ) -> Tensor:
        """See `kernels.norm.fused_add_rms_norm`."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `kernels.norm.layer_norm`."""

    def fused_add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """See `kernels.norm.fused_add_layer_norm`."""


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

    The numerics are those of `transformers`: the mean of squares in float32, the normalised row
    rounded to the dtype of `x`, then multiplied by `weight` in that dtype. With `zero_centered`
    the factor is `1 + weight`, all in float32, and the result is rounded once, as in Gemma.

    Args:
        x: `[num_tokens, hidden_size]`, float16, bfloat16 or float32, contiguous.
        weight: `[hidden_size]`, the dtype of `x`.
        eps: added to the mean square.
        zero_centered: whether the factor is `1 + weight`.

    Returns:
        A new `[num_tokens, hidden_size]` tensor, the dtype of `x`.
    """
    return _kernels(x.device.type).rms_norm(x, weight, eps, zero_centered)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> Tensor:
    """Add `x` to the residual stream in place and return the norm of the sum.

    Args:
        x: `[num_tokens, hidden_size]`, float16, bfloat16 or float32, contiguous; unchanged.
        residual: the shape and dtype of `x`, contiguous; becomes `residual + x`, rounded to its
            dtype before the norm is taken.
        weight: `[hidden_size]`, the dtype of `x`.
        eps: added to the mean square.
        zero_centered: as for `rms_norm`.

    Returns:
        A new `[num_tokens, hidden_size]` tensor, the dtype of `x`.
    """
    return _kernels(x.device.type).fused_add_rms_norm(x, residual, weight, eps, zero_centered)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize each row of `x` to mean 0 and variance 1, scale by `weight` and add `bias`.

    Args:
        x: `[num_tokens, hidden_size]`, float16, bfloat16 or float32, contiguous.
        weight: `[hidden_size]`, the dtype of `x`.
        bias: likewise; `None` for none.
        eps: added to the variance, which is taken in float32.

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
        residual: the shape and dtype of `x`, contiguous; becomes `residual + x`, rounded to its
            dtype before the norm is taken.
        weight: `[hidden_size]`, the dtype of `x`.
        bias: likewise; `None` for none.
        eps: as for `layer_norm`.

    Returns:
        A new `[num_tokens, hidden_size]` tensor, the dtype of `x`.
    """
    return _kernels(x.device.type).fused_add_layer_norm(x, residual, weight, bias, eps)
