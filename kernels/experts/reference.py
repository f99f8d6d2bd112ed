"""Experts one after the other, each with two products of its tokens.

Unused experts are not read.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.activation import Gate, act_and_mul
from kernels.experts import ExpertBiases, PackedExperts
from kernels.linear import PackedLinear, pack


class LoopedExperts(PackedExperts):
    """Two products of `kernels.linear` per expert.

    The host waits for the device to learn which experts are used.
    """

    def __init__(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> None:
        """Keep the products of each expert; their weights may be stored in any form."""
        self.num_experts = len(gate_up)
        self._gate_up, self._down = list(gate_up), list(down)

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        activation: Gate,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        flat = expert_ids.flatten()
        order = flat.argsort(stable=True)
        tokens = order // expert_ids.shape[1]
        counts = torch.bincount(flat, minlength=self.num_experts).tolist()[: self.num_experts]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if not sum(counts):
            return out.to(x.dtype)
        made = []
        first = 0
        gathered = x.index_select(0, tokens)
        for expert, count in enumerate(counts):
            if count:
                part = gathered[first : first + count]
                made.append(self._made(expert, part, activation, biases))
                first += count
        scaled = torch.cat(made).float().mul_(weights.flatten()[order[:first]].unsqueeze(1))
        return out.index_add_(0, tokens[:first], scaled).to(x.dtype)

    def _made(
        self, expert: int, x: Tensor, activation: Gate, biases: ExpertBiases | None
    ) -> Tensor:
        """Return the output of one expert for its tokens `x`."""
        if biases is None and activation != "swigluoai":
            return self._down[expert](self._gate_up[expert].gated(x, activation))
        both = self._gate_up[expert](x)
        if biases is not None:
            both += biases.gate_up[expert]
        out = self._down[expert](act_and_mul(both, activation))
        return out if biases is None or biases.down is None else out.add_(biases.down[expert])

    def unpack(self) -> tuple[Tensor, Tensor]:
        gate_up, down = (
            torch.stack([each.unpack() for each in packed])
            for packed in (self._gate_up, self._down)
        )
        return gate_up, down

    def unpack_one(self, expert: int) -> tuple[Tensor, Tensor]:
        return self._gate_up[expert].unpack(), self._down[expert].unpack()

    def repack(self, gate_up: Tensor, down: Tensor) -> None:
        for packed, weights in ((self._gate_up, gate_up), (self._down, down)):
            for each, weight in zip(packed, weights, strict=True):
                each.repack(weight.contiguous())

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in (*self._gate_up, *self._down))


def pack_experts(gate_up: Tensor, down: Tensor, linear: str | None) -> PackedExperts:
    """Pack the experts of a layer; see `kernels.experts.pack_experts`."""
    return LoopedExperts(
        *([pack(each.contiguous(), None, linear) for each in plain] for plain in (gate_up, down))
    )
