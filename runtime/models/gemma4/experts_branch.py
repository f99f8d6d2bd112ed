"""The mixture of experts that Gemma 4 computes in addition to a layer's dense block."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from runtime.models.decoder.experts_spec import ExpertsSpec
from runtime.models.gemma4.spec import Gemma4Spec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.experts import Experts
from runtime.models.layers.norm import RMSNorm
from runtime.models.layers.parameter import WeightHolder, WeightShard
from runtime.models.layers.router import Router
from runtime.models.layers.vector import Vector


class ExpertsBranch:
    """A router and experts. Both read the residual stream, each through a norm of its own."""

    def __init__(
        self, spec: Gemma4Spec, experts: ExpertsSpec, context: BuildContext, layer_idx: int
    ) -> None:
        hidden, eps = spec.hidden_size, spec.rms_norm_eps
        self._counts, self._layer_idx = context.expert_counts, layer_idx
        self._activation, self._root = spec.activation, hidden**-0.5
        self._reduce = context.all_reduce if context.tp_size > 1 else None
        self.router = Router(experts, hidden, context)
        self.router_norm = RMSNorm(hidden, eps, context)
        self.factors = Vector(WeightShard((experts.num_experts,)), context)
        self.experts = Experts(experts, hidden, context)
        self.norm = RMSNorm(hidden, eps, context)
        self.output_norm = RMSNorm(hidden, eps, context)

    def forward(self, stream: Tensor) -> Tensor:
        """Compute the experts' output for the residual stream.

        Args:
            stream: `[num_tokens, hidden_size]`.

        Returns:
            A new tensor of the shape of `stream`.
        """
        routed = self.router_norm.forward(stream).mul_(self._root)
        expert_ids, weights = self.router.choose(routed, self.experts)
        if self._counts is not None:
            self._counts.note(self._layer_idx, expert_ids)
        weights = weights * self.factors.vector[expert_ids]
        out = self.experts.apply(self.norm.forward(stream), expert_ids, weights, self._activation)
        if self._reduce is not None:
            out = self._reduce(out)
        return self.output_norm.forward(out)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under the layer's `prefix`."""
        yield from self.router.holders(f"{prefix}.router")
        yield f"{prefix}.router_norm", self.router_norm
        yield f"{prefix}.expert_factors", self.factors
        yield f"{prefix}.experts", self.experts
        yield f"{prefix}.expert_norm", self.norm
        yield f"{prefix}.expert_output_norm", self.output_norm
