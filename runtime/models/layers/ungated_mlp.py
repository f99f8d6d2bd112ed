"""A feed-forward block without a gate: two products with an activation between them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.activation import Unary
from kernels.rounding import Activations, Rounding
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Linear, column
from runtime.models.layers.parameter import WeightHolder


class UngatedBlock:
    """The feed-forward block of Starcoder 2: `down(activation(up(x)))`."""

    __slots__ = ("activation", "down_proj", "up_proj")

    def __init__(
        self, hidden: int, size: int, activation: Unary, context: BuildContext, *, bias: bool
    ) -> None:
        self.activation = activation
        self.up_proj = Linear.column_parallel(hidden, [column("", size, context)], bias, context)
        self.down_proj = Linear.row_parallel(size, hidden, bias, context)

    @property
    def rounding(self) -> Rounding | None:
        """Return `None`: a product with a fused activation takes floats and rounds them itself."""
        return None

    def forward(self, hidden: Activations) -> Tensor:
        """Compute the block: `[num_tokens, hidden_size]` to a new tensor of the same shape."""
        assert isinstance(hidden, Tensor), "norms ahead of this block do not round"
        return self.down_proj.apply(self.up_proj.activated(hidden, self.activation))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield f"{prefix}.up_proj", self.up_proj
        yield f"{prefix}.down_proj", self.down_proj
