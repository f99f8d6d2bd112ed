"""Low-rank adapters (LoRA) of linear layers: each token of a step may use an adapter of its own.

A first kernel shrinks each token to its adapter's rank; a second one expands it and adds the result
to the product.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; Chen et al., "Punica:
Multi-Tenant LoRA Serving", 2023, for adapters of many requests in one step.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.activation import Activation, act_and_mul
from kernels.linear import PackedLinear
from kernels.table import Entry, Table

__all__ = ["LORA", "LoraBank", "LoraKernels", "LoraPart", "TokenSlots", "bank_width", "make_bank"]


@dataclass(frozen=True)
class LoraPart:
    """Rows of a product for which adapters have separate matrices, such as q of a fused product.

    Attributes:
        first: first of these rows in the product's weight.
        num_rows: number of rows.
    """

    first: int
    num_rows: int


class TokenSlots:
    """The adapter slot of each token of a step.

    Attributes:
        slots: `[num_tokens]` int32 on the device: a slot, or -1 for a token without an adapter.
        num_slots: number of slots for adapters.
        derived: data that an implementation computes from `slots` and keeps for the step.
    """

    __slots__ = ("derived", "num_slots", "slots")

    def __init__(self, slots: Tensor, num_slots: int) -> None:
        self.slots = slots
        self.num_slots = num_slots
        self.derived: object = None

    def __len__(self) -> int:
        return len(self.slots)


def bank_width(in_features: int, parts: Sequence[LoraPart]) -> int:
    """Return how many numbers one rank of an adapter has for a product.

    They are one row of A for each part, and one column of B for each part.
    """
    return len(parts) * in_features + sum(part.num_rows for part in parts)


class LoraBank(ABC):
    """The LoRA matrices A and B of one linear layer, for all adapters in device memory.

    A part is one of the projections that the layer's weight joins, such as q, k and v.

    Attributes:
        memory: `[num_slots, max_rank, width]`, the dtype of the activations. Only the last
            dimension must be contiguous. `memory[slot, i]` belongs to row i of an adapter's A and
            to column i of its B. It holds row i of A for each part, `[in_features]`, and behind
            these column i of B for each part, `[num_rows]`, already scaled.
        ranks: `[num_slots]` int32 on the same device: number of ranks in use. Further ranks are
            ignored.
        in_features: columns of the layer's weight.
        parts: the parts, in the order of their rows in the layer's weight.
    """

    def __init__(
        self, memory: Tensor, ranks: Tensor, in_features: int, parts: Sequence[LoraPart]
    ) -> None:
        assert memory.shape[2] == bank_width(in_features, parts)
        assert memory.stride(2) == 1
        assert ranks.dtype is torch.int32
        self.memory = memory
        self.ranks = ranks
        self.in_features = in_features
        self.parts = tuple(parts)

    def shrinks(self, part: int) -> Tensor:
        """Return the matrices A of a part, `[num_slots, max_rank, in_features]`, a view."""
        return self.memory.narrow(2, part * self.in_features, self.in_features)

    def expands(self, part: int) -> Tensor:
        """Return the transposed matrices B of a part, `[num_slots, max_rank, num_rows]`, a view."""
        before = sum(each.num_rows for each in self.parts[:part])
        start = len(self.parts) * self.in_features + before
        return self.memory.narrow(2, start, self.parts[part].num_rows)

    @abstractmethod
    def add(self, out: Tensor, x: Tensor, tokens: TokenSlots) -> None:
        """Add each token's adapter to a product in place.

        Sums are float32. An implementation may round the shrunk values. The result is rounded once.
        A row's result does not depend on other rows.

        Args:
            out: `[num_tokens, out_features]`, contiguous, the dtype of the memory.
            x: `[num_tokens, in_features]`, contiguous, the same dtype.
            tokens: the adapter slots of these tokens.
        """

    def product(self, base: PackedLinear, x: Tensor, tokens: TokenSlots) -> Tensor:
        """Return a product plus each token's adapter, `[num_tokens, out_features]`.

        Args:
            base: the linear layer without adapters, in any packed form.
            x: `[num_tokens, in_features]`, contiguous.
            tokens: the adapter slots of these tokens.
        """
        # Some linear layers return a part of a wider tensor.
        out = base(x).contiguous()
        self.add(out, x, tokens)
        return out

    def gated(
        self, base: PackedLinear, x: Tensor, activation: Activation, tokens: TokenSlots
    ) -> Tensor:
        """Return `activation(gate) * up` of the two halves of `product`."""
        return act_and_mul(self.product(base, x, tokens), activation)


class LoraKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def make_bank(
        self, memory: Tensor, ranks: Tensor, in_features: int, parts: Sequence[LoraPart]
    ) -> LoraBank:
        """Return a bank of this implementation; see `kernels.lora.make_bank`."""


LORA: Table[LoraKernels] = Table(
    "lora",
    {
        "reference": Entry("kernels.lora.reference"),
        "cpu": Entry("kernels.lora.cpu", probe="kernels.cpu.library:unavailable", invariant=True),
        "triton": Entry("kernels.lora.triton", probe="kernels.triton_support.device:unavailable"),
    },
    {"cpu": ("cpu",), "cuda": ("triton",)},
)


def make_bank(
    memory: Tensor,
    ranks: Tensor,
    in_features: int,
    parts: Sequence[LoraPart],
    implementation: str | None = None,
) -> LoraBank:
    """Return the bank of one linear layer: A and B of all adapters, and kernels that add them.

    Args:
        memory: `[num_slots, max_rank, width]`, A and B in the layout of `LoraBank.memory`.
        ranks: `[num_slots]` int32, the LoRA rank of the adapter in each slot.
        in_features: columns of the layer's weight.
        parts: the projections that the layer's weight joins, in the order of their rows.
        implementation: name in `LORA`; `None` for the fastest on the device.

    Raises:
        ValueError: `implementation` is unknown.
        RuntimeError: `implementation` cannot run here.
    """
    kernels = LORA.choose(memory.device.type, implementation).kernels
    return kernels.make_bank(memory, ranks, in_features, parts)
