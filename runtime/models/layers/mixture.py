"""A feed-forward block of experts: a router, the experts, and perhaps a shared expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from kernels.activation import Activation, Gate, sigmoid_mul
from runtime.models.decoder.experts_spec import ExpertsSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.experts import Experts
from runtime.models.layers.linear import Linear
from runtime.models.layers.parameter import WeightHolder
from runtime.models.layers.router import Router


class SparseMLP:
    """The mixture of experts that replaces a layer's dense feed-forward block."""

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden: int,
        activation: Activation,
        context: BuildContext,
        layer_idx: int,
        shared: SharedExpert | None,
    ) -> None:
        """Build the router and the experts.

        Args:
            spec: description of the experts.
            hidden: width of the model.
            activation: the model's activation, for experts whose spec names no gate.
            context: dtype, device and rank.
            layer_idx: index of the layer.
            shared: the expert that every token passes, if there is one.
        """
        self._counts, self._layer_idx = context.expert_counts, layer_idx
        self._activation: Gate = spec.gate or activation
        self.router = Router(spec, hidden, context)
        self.experts = Experts(spec, hidden, context)
        self._reduce = context.all_reduce if context.tp_size > 1 else None
        self.shared = shared

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the block: `[num_tokens, hidden_size]` to a new tensor of the same shape."""
        expert_ids, weights = self.router.choose(hidden, self.experts)
        if self._counts is not None:
            self._counts.note(self._layer_idx, expert_ids)
        out = self.experts.apply(hidden, expert_ids, weights, self._activation)
        if self._reduce is not None:
            out = self._reduce(out)
        return out if self.shared is None else self.shared.add_to(out, hidden)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        yield from self.router.holders(f"{prefix}.router")
        yield f"{prefix}.experts", self.experts
        if self.shared is not None:
            yield from self.shared.holders(prefix)


class SharedExpert:
    """The expert that every token passes.

    Its result is multiplied by a sigmoid gate if it has one.
    """

    def __init__(
        self,
        hidden: int,
        context: BuildContext,
        block: Callable[[Tensor], Tensor],
        holders: Callable[[str], Iterator[tuple[str, WeightHolder]]],
        *,
        has_gate: bool,
    ) -> None:
        self.gate = Linear.replicated(hidden, 1, False, context) if has_gate else None
        self._block, self._holders = block, holders

    def add_to(self, out: Tensor, hidden: Tensor) -> Tensor:
        """Add the expert's result to `out` in place; both are `[num_tokens, hidden_size]`."""
        if self.gate is None:
            return out.add_(self._block(hidden))
        return out.add_(sigmoid_mul(self.gate.apply(hidden), self._block(hidden)))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        if self.gate is not None:
            yield f"{prefix}.shared_gate", self.gate
        yield from self._holders(f"{prefix}.shared")
