"""Experts by torch's grouped products, after tokens are sorted by expert.

The host never waits for the device.
"""

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from kernels.activation import Gate, act_and_mul
from kernels.experts import ExpertBiases, PackedExperts
from kernels.experts.plain import PlainExperts


class GroupedExperts(PlainExperts):
    """Two grouped products of torch; a CUDA graph may capture them."""

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        activation: Gate,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        num_tokens, num_chosen = expert_ids.shape
        flat = expert_ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=x.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat))
        ends = counts[: self.num_experts].cumsum(0).to(torch.int32)
        gathered = x.index_select(0, order // num_chosen)
        inner = grouped_mm(gathered, self._gate_up.transpose(1, 2), offs=ends)
        # Experts on other ranks have no row of biases, and their results are dropped.
        row = flat[order].clamp(max=self.num_experts - 1)
        if biases is not None:
            inner += biases.gate_up[row]
        made = grouped_mm(act_and_mul(inner, activation), self._down.transpose(1, 2), offs=ends)
        if biases is not None and biases.down is not None:
            made += biases.down[row]
        # Rows of experts on other ranks come last, and their content is undefined.
        is_here = (flat < self.num_experts).unsqueeze(1)
        placed = torch.empty_like(made).index_copy_(0, order, made).float()
        scaled = torch.where(is_here, placed * weights.reshape(-1, 1), 0.0)
        return scaled.view(num_tokens, num_chosen, -1).sum(dim=1).to(x.dtype)


def pack_experts(gate_up: Tensor, down: Tensor, linear: str | None) -> PackedExperts:  # noqa: ARG001
    """Pack the experts of a layer; see `kernels.experts.pack_experts`."""
    return GroupedExperts(gate_up, down)
