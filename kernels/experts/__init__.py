"""Mixtures of experts: each token passes through the feed-forward blocks that a router chose."""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.activation import Gate
from kernels.table import Entry, Table

__all__ = ["EXPERTS", "ExpertBiases", "ExpertsKernels", "PackedExperts", "pack_experts"]


class ExpertBiases(NamedTuple):
    """The biases that this rank's experts add to their products.

    Attributes:
        gate_up: `[num_experts, 2 * intermediate_size]`, gate first, the dtype of the experts.
        down: `[num_experts, hidden_size]`, the dtype of the experts; `None` if another rank adds
            it.
    """

    gate_up: Tensor
    down: Tensor | None


class PackedExperts(ABC):
    """All experts of a layer on this rank, in the layout of an implementation.

    Attributes:
        num_experts: number of experts on this rank.
    """

    num_experts: int

    def choose(
        self, logits: Tensor, num_chosen: int, *, sums_to_one: bool
    ) -> tuple[Tensor, Tensor]:
        """Return each token's experts and their weights by a float32 softmax, as in `transformers`.

        Args:
            logits: `[num_tokens, experts of the layer]`, from the router.
            num_chosen: number of experts per token.
            sums_to_one: whether a token's weights are scaled to a sum of one.

        Returns:
            The experts' ids, `[num_tokens, num_chosen]` int64, and their weights, float32 of the
            same shape.
        """
        weights, expert_ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(
            num_chosen, dim=-1
        )
        if sums_to_one:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return expert_ids, weights

    @abstractmethod
    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        activation: Gate,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token.

        Args:
            x: `[num_tokens, hidden_size]`, contiguous, the dtype of the experts.
            expert_ids: `[num_tokens, num_chosen]` int64; the id `num_experts` means an expert on
                another rank.
            weights: `[num_tokens, num_chosen]` float32, the experts' factors in the sum.
            activation: how gate and up are combined.
            biases: biases of the products, or `None`.

        Returns:
            A new `[num_tokens, hidden_size]` tensor, the dtype of `x`. The sum is computed in
            float32.
        """

    @abstractmethod
    def unpack(self) -> tuple[Tensor, Tensor]:
        """Return the weights of all experts without packing; do not write to them.

        They may share memory with the packed weights.

        Returns:
            The arguments `gate_up` and `down` of `pack_experts`.
        """

    @abstractmethod
    def unpack_one(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return the weights of expert number `expert` without packing; do not write to them.

        They may share memory with the packed weights.

        Returns:
            `[2 * intermediate_size, hidden_size]` and `[hidden_size, intermediate_size]`.
        """

    @abstractmethod
    def repack(self, gate_up: Tensor, down: Tensor) -> None:
        """Replace the weights in place; shapes and dtype are those of `pack_experts`."""

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of all experts in memory."""


class ExpertsKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def pack_experts(self, gate_up: Tensor, down: Tensor, linear: str | None) -> PackedExperts:
        """Pack the experts of a layer; see `kernels.experts.pack_experts`."""


EXPERTS: Table[ExpertsKernels] = Table(
    "experts",
    {
        "reference": Entry("kernels.experts.reference", invariant=True),
        "grouped": Entry("kernels.experts.grouped"),
        "triton": Entry(
            "kernels.experts.triton", probe="kernels.triton_support.device:unavailable"
        ),
        "triton_invariant": Entry(
            "kernels.experts.triton_invariant",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cuda": ("triton", "grouped", "triton_invariant")},
)


def pack_experts(
    gate_up: Tensor, down: Tensor, linear: str | None = None, implementation: str | None = None
) -> PackedExperts:
    """Pack the experts of a layer in a layout for fast products.

    Args:
        gate_up: `[num_experts, 2 * intermediate_size, hidden_size]`, gate rows first.
        down: `[num_experts, hidden_size, intermediate_size]`.
        linear: name in `kernels.linear.LINEAR`, for implementations that use linear layers; `None`
            for the fastest on the device.
        implementation: a name in `EXPERTS`; `None` for the fastest on the weights' device.

    Raises:
        ValueError: `implementation` is unknown.
    """
    kernels = EXPERTS.choose(gate_up.device.type, implementation).kernels
    return kernels.pack_experts(gate_up, down, linear)
