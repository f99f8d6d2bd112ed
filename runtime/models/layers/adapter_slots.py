"""LoRA adapters in a model's layers: the adapter of each token, and the products that apply it.

At each step the executor sets the device slot of every token's adapter. When tokens leave the step,
the loop over layers removes their slots. Other code of layers and families does not deal with
adapters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation import Activation, Unary, unary
from kernels.linear import PackedLinear
from kernels.lora import LoraBank, TokenSlots


class AdapterSlots:
    """The LoRA adapters of the current step's tokens.

    A CUDA graph repeats the work that was captured. So steps with adapters and steps without
    adapters have different graphs.

    Attributes:
        num_slots: number of adapters that the device holds.
        is_on: whether any token of this step uses an adapter.
        tokens: the adapter slot of each token that the layers compute; only valid if `is_on`.
    """

    def __init__(self, num_slots: int) -> None:
        """Start with no adapter in use."""
        self.num_slots = num_slots
        self.is_on = False
        self.tokens = TokenSlots(torch.empty(0, dtype=torch.int32), num_slots)

    def begin(self, slots: Tensor) -> None:
        """Set the adapter slots of a step's tokens: `[num_tokens]` int32, -1 for no adapter."""
        self.tokens = TokenSlots(slots, self.num_slots)

    def narrow(self, wanted: Tensor) -> None:
        """Keep only the tokens `wanted`, `[n]` int64 indices, for the rest of the step."""
        if self.is_on:
            self.begin(self.tokens.slots.index_select(0, wanted))


class AdaptedLinear(PackedLinear):
    """A linear layer of any packed form with LoRA adapters added to its product.

    In a step without adapters, only the packed layer is called, so its fused kernels stay in use.
    """

    def __init__(self, base: PackedLinear, bank: LoraBank, slots: AdapterSlots) -> None:
        super().__init__(base.in_features, base.out_features)
        self.implementation = base.implementation
        self._base, self._bank, self._slots = base, bank, slots

    def __call__(self, x: Tensor) -> Tensor:
        if not self._slots.is_on:
            return self._base(x)
        return self._bank.product(self._base, x, self._slots.tokens)

    def write(self, x: Tensor, out: Tensor) -> None:
        self._base.write(x, out)
        if self._slots.is_on:
            self._bank.add(out, x, self._slots.tokens)

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        if not self._slots.is_on:
            return self._base.gated(x, activation)
        return self._bank.gated(self._base, x, activation, self._slots.tokens)

    def activated(self, x: Tensor, activation: Unary) -> Tensor:
        if not self._slots.is_on:
            return self._base.activated(x, activation)
        return unary(self(x), activation)

    @property
    def size_bytes(self) -> int:
        return self._base.size_bytes

    def unpack(self) -> Tensor:
        return self._base.unpack()

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._base.repack(weight, bias)
