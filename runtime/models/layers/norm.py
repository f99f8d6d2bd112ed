"""RMS norms and layer norms with their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

from torch import Tensor

from kernels.norm import fused_add_layer_norm, fused_add_rms_norm, layer_norm, rms_norm
from kernels.rounding import Activations, RoundedTokens, Rounding, rms_norm_rounded
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import Parameter, WeightHolder, WeightShard, whole


class LayerNorm(WeightHolder):
    """A layer norm's weight, bias and epsilon; the tensors never change their addresses."""

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
        """Add `x` to `residual`, `[num_tokens, size]`, in place; return the norm of the sum."""
        return fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._parameters.items()

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Do nothing: both tensors are used in the memory that the loader filled."""

    def discard(self) -> None:
        """Do nothing: the loader fills each tensor in one go and leaves no partial state."""

    def plain(self, name: str) -> Tensor:
        return self._parameters[name].allocate()

    def release(self) -> None:
        """Do nothing: the tensors are too small to be worth releasing."""

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class RMSNorm(WeightHolder):
    """An RMS norm's weight and epsilon; the tensor never changes its address.

    Attributes:
        zero_centered: whether the norm multiplies by `1 + weight`; see `kernels.norm.rms_norm`.
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
        """Allocate the weight: `[size]`, or this rank's `part` of it."""
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
        """Add `x` to `residual`, `[num_tokens, size]`, in place; return the norm of the sum."""
        return fused_add_rms_norm(x, residual, self.weight, self.eps, self.zero_centered)

    def rounded(self, x: Tensor, residual: Tensor | None, rounding: Rounding) -> RoundedTokens:
        """Return the norm, rounded as the product that reads it rounds its input.

        Args:
            x: `[num_tokens, size]`.
            residual: if given, a tensor of the shape of `x`, to which `x` is added in place before
                the norm. The norm is then that of the sum.
            rounding: how that product rounds its input.
        """
        return rms_norm_rounded(x, residual, self.weight, self.eps, self.zero_centered, rounding)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield "weight", self.parameter

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Do nothing: the weight is used in the memory that the loader filled."""

    def discard(self) -> None:
        """Do nothing: the loader fills the weight in one go and leaves no partial state."""

    def plain(self, name: str) -> Tensor:  # noqa: ARG002  # there is one
        return self.weight

    def release(self) -> None:
        """Do nothing: the weight is small, and attention layers hold references to it."""

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
    """Add `hidden` to the residual stream in place and return the norm of the stream.

    Args:
        hidden: `[num_tokens, hidden_size]`, a layer's output that is not yet added to `residual`;
            `None` if there is none.
        residual: the residual stream, `[num_tokens, hidden_size]`.
        norm: the norm; `None` if the next block reads the stream itself, which is then returned.
        rounding: how the product that reads the result rounds its input. The result of an RMS norm
            is then rounded in this way. The product rounds the result of a layer norm itself.
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
