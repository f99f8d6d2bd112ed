"""Layer normalisation with its weight and, in most models, its bias."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.norm import fused_add_layer_norm, layer_norm
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import Parameter, WeightHolder, whole


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

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to `residual`, `[num_tokens, size]`, in place; return the sum's norm, new."""
        return fused_add_layer_norm(x, residual, self.weight, self.bias, self.eps)

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        yield from self._parameters.items()

    def finalize(self, kept: list[tuple[str, str]]) -> None:
        """Nothing to do: both are used where they were filled."""

    def discard(self) -> None:
        """Nothing to do: each is filled in one go."""

    def plain(self, name: str) -> Tensor:
        return self._parameters[name].allocate()

    def release(self) -> None:
        """Nothing to do: a norm is small."""

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
