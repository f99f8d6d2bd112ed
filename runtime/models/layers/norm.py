"""Norms with their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

from torch import Tensor

from kernels.norm import fused_add_layer_norm, fused_add_rms_norm, layer_norm, rms_norm
from kernels.rounding import Activations, RoundedTokens, Rounding, rms_norm_rounded
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import Parameter, WeightHolder, WeightShard, whole


class LayerNorm(WeightHolder):
    """Weight, bias and epsilon of one norm; the tensors keep their addresses for life."""

    __slots__ = ("_parameters", "bias", "eps", "shape", "weight")

    def __init__(
        self, size: int, eps: float, context: BuildContext, *, has_bias: bool = True
    ) -> None:
        self.shape = (size,)
        self._parameters = {
            name: Parameter(self.shape, whole(self.shape), context.dtype, context.device)
            for name in (("weight", "bias") if has_bias else ("weight",))
        }
        self.weight = self._parameters["weight"].allocate()
        self.bias = self._parameters["bias"].allocate() if has_bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `x`, `[num_tokens, size]`, as a new tensor."""
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add_forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to `residual`, `[num_tokens, size]`, in place; return the sum's norm, new."""
        return fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._parameters.items()

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Do nothing: both tensors are used where they were filled."""

    def discard(self) -> None:
        """Do nothing: each tensor is filled at once."""

    def plain(self, name: str) -> Tensor:
        return self._parameters[name].allocate()

    def release(self) -> None:
        """Do nothing: a norm is small."""

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class RMSNorm(WeightHolder):
    """Weight and epsilon of one norm; the tensor keeps its address for life.

    Attributes:
        zero_centered: whether the factor is `1 + weight`; see `kernels.norm.rms_norm`.
    """

    __slots__ = ("eps", "parameter", "weight", "zero_centered")

    def __init__(
        self,
        size: int,
        eps: float,
        context: BuildContext,
        *,
        zero_centered: bool = False,
        part: WeightShard | None = None,
    ) -> None:
        """Make the weight: `[size]`, or this rank's `part` of it."""
        shards = whole((size,)) if part is None else {"": part}
        shape = shards[""].local_shape
        self.parameter = Parameter(shape, shards, context.dtype, context.device)
        self.weight = self.parameter.allocate()
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `x`, `[num_tokens, size]`, as a new tensor."""
        return rms_norm(x, self.weight, self.eps, self.zero_centered)

    def add_forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to `residual` in place and return the norm of the sum."""
        return fused_add_rms_norm(x, residual, self.weight, self.eps, self.zero_centered)

    def rounded(self, x: Tensor, residual: Tensor | None, rounding: Rounding) -> RoundedTokens:
        """Return the norm in the form that a product with `rounding` takes.

        Args:
            x: `[num_tokens, size]`.
            residual: the shape of `x`, to which `x` is added in place ahead of the norm, if given.
            rounding: how that product rounds its input.
        """
        return rms_norm_rounded(x, residual, self.weight, self.eps, self.zero_centered, rounding)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self.parameter

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Do nothing: the weight is used where it was filled."""

    def discard(self) -> None:
        """Do nothing: a norm is filled at once."""

    def plain(self, name: str) -> Tensor:  # noqa: ARG002  # there is one
        return self.weight

    def release(self) -> None:
        """Do nothing: a norm is small, and attention layers hold its tensor."""

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes


@overload
def add_normed(
    hidden: Tensor | None, residual: Tensor, norm: RMSNorm | LayerNorm | None
) -> Tensor: ...
@overload
def add_normed(
    hidden: Tensor | None,
    residual: Tensor,
    norm: RMSNorm | LayerNorm | None,
    rounding: Rounding | None,
) -> Activations: ...
def add_normed(
    hidden: Tensor | None,
    residual: Tensor,
    norm: RMSNorm | LayerNorm | None,
    rounding: Rounding | None = None,
) -> Activations:
    """Add `hidden` to the stream in place and return the stream's norm.

    Args:
        hidden: `[num_tokens, hidden_size]`, what `residual` still lacks, if anything.
        residual: the stream, `[num_tokens, hidden_size]`.
        norm: `None` if the next block reads the stream itself.
        rounding: how the product that takes the norm rounds its input; an RMS norm is then rounded
            in this way, and the product rounds a layer norm itself.
    """
    if norm is None:
        return residual if hidden is None else residual.add_(hidden)
    if rounding is not None and isinstance(norm, RMSNorm):
        return (
            norm.rounded(residual, None, rounding)
            if hidden is None
            else norm.rounded(hidden, residual, rounding)
        )
    return norm.forward(residual) if hidden is None else norm.add_forward(hidden, residual)
