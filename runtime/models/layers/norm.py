"""RMS normalisation with its weight."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.norm import fused_add_rms_norm, rms_norm
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import Parameter, WeightHolder, whole


class RMSNorm(WeightHolder):
    """Weight and epsilon of one norm; the tensor keeps its address for life.

    Attributes:
        zero_centered: whether the factor is `1 + weight`; see `kernels.norm.rms_norm`.
    """

    __slots__ = ("eps", "parameter", "weight", "zero_centered")

    def __init__(
        self, size: int, eps: float, context: BuildContext, *, zero_centered: bool = False
    ) -> None:
        self.parameter = Parameter((size,), whole((size,)), context.dtype, context.device)
        self.weight = self.parameter.allocate()
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `x`, `[num_tokens, size]`, as a new tensor."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered)

    def add_forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to `residual` in place and return the norm of the sum."""
        return fused_add_rms_norm(x, residual, self.weight, self.eps, self.zero_centered)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self.parameter

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Nothing to do: the weight is used where it was filled."""

    def discard(self) -> None:
        """Nothing to do: a norm is filled in one go."""

    def plain(self, name: str) -> Tensor:  # noqa: ARG002  # there is one
        return self.weight

    def release(self) -> None:
        """Nothing to do: a norm is small, and attention layers hold its tensor."""

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes
