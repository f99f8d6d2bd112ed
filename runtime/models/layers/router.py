"""Routing in a mixture of experts: the experts of each token and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kernels.activation import sigmoid_mul
from runtime.models.decoder.experts_spec import ExpertsSpec, RouterSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.experts import Experts
from runtime.models.layers.linear import Linear
from runtime.models.layers.parameter import WeightHolder, WeightShard
from runtime.models.layers.vector import Vector

# This is added to a sum of sigmoids before weights are divided by the sum, as in `transformers`.
_LEAST_SUM = 1e-20


class Router:
    """The product that scores experts, and the choice of each token's experts.

    Attributes:
        gate: the product that gives the logits, whole on every rank.
        correction: numbers that are added to scores when experts are chosen, but not to weights;
            `None` if there are none.
    """

    def __init__(self, spec: ExpertsSpec, hidden: int, context: BuildContext) -> None:
        self._spec, self._num_chosen = spec.router, spec.num_chosen
        num_experts = spec.num_experts
        if self._spec.is_precise:
            context = replace(context, dtype=torch.float32)
        self.gate = Linear.replicated(hidden, num_experts, self._spec.has_bias, context)
        self.correction: Vector | None = None
        if self._spec.has_correction:
            self.correction = Vector(WeightShard((num_experts,)), context)

    def choose(self, hidden: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights.

        Args:
            hidden: `[num_tokens, hidden_size]`.
            experts: the layer's experts, whose kernels choose if `RouterSpec.is_plain`.

        Returns:
            The experts' ids, `[num_tokens, num_chosen]` int64, and their weights, float32 of the
            same shape.
        """
        spec = self._spec
        logits = self.gate.apply(hidden.float() if spec.is_precise else hidden)
        if spec.is_plain:
            ids, weights = experts.choose(logits, sums_to_one=spec.sums_to_one)
        else:
            correction = None if self.correction is None else self.correction.vector
            ids, weights = choose(logits, self._num_chosen, spec, correction)
        return ids, weights if spec.scaling == 1.0 else weights * spec.scaling

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights; the product's name is `prefix`."""
        yield prefix, self.gate
        if self.correction is not None:
            yield f"{prefix}_correction", self.correction


def choose(
    logits: Tensor, num_chosen: int, spec: RouterSpec, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return each token's experts and their weights before `spec.scaling`, in float32.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; groups: arXiv 2405.04434.

    Args:
        logits: `[num_tokens, num_experts]`.
        num_chosen: number of a token's experts.
        spec: how experts are chosen.
        correction: `[num_experts]` float32, added to scores when experts are chosen, or `None`.
    """
    wide = logits.float()
    scores = _sigmoid(wide) if spec.score == "sigmoid" else wide.softmax(dim=-1)
    ranked = scores if correction is None else scores + correction
    if spec.num_groups > 1:
        ranked = _within_best_groups(ranked, spec)
    ids = ranked.topk(num_chosen, dim=-1).indices
    weights = scores.gather(1, ids)
    if spec.sums_to_one:
        least = _LEAST_SUM if spec.score == "sigmoid" else 0.0
        weights = weights / (weights.sum(dim=-1, keepdim=True) + least)
    return ids, weights


def _sigmoid(wide: Tensor) -> Tensor:
    if wide.device.type != "cpu":
        return wide.sigmoid()
    # On a CPU, the bits of torch's sigmoid depend on an element's place in the whole tensor, and so
    # on the batch.
    return sigmoid_mul(wide, torch.ones_like(wide))


def _within_best_groups(ranked: Tensor, spec: RouterSpec) -> Tensor:
    """Return the scores, with minus infinity for experts outside each token's best groups."""
    groups = ranked.unflatten(1, (spec.num_groups, -1))
    if spec.group_score == "best":
        of_groups = groups.amax(dim=-1)
    else:
        of_groups = groups.topk(2, dim=-1).values.sum(dim=-1)
    best = of_groups.topk(spec.num_chosen_groups, dim=-1).indices
    is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(1)
