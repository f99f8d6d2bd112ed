"""LoRA adapters in the C++ library: all threads make two passes over tokens grouped by adapter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, library
from kernels.lora import LoraBank, LoraPart, TokenSlots
from kernels.lora.reference import TorchBank

_add = library().hr_lora_add


class CppBank(LoraBank):
    """Adapters in bfloat16 or float32; a token's result has the same bits in any batch."""

    def __init__(
        self, memory: Tensor, ranks: Tensor, in_features: int, parts: Sequence[LoraPart]
    ) -> None:
        super().__init__(memory, ranks, in_features, parts)
        numbers = [[part.first, part.num_rows] for part in parts]
        self._parts = torch.tensor(numbers, dtype=torch.int64)

    def add(self, out: Tensor, x: Tensor, tokens: TokenSlots) -> None:
        memory = self.memory
        assert x.is_contiguous()
        assert out.is_contiguous()
        assert x.dtype is out.dtype is memory.dtype
        assert len(x) == len(out) == len(tokens)
        _add(
            memory.dtype is torch.bfloat16,
            x.data_ptr(),
            out.data_ptr(),
            memory.data_ptr(),
            memory.stride(0),
            memory.stride(1),
            tokens.slots.data_ptr(),
            self.ranks.data_ptr(),
            self._parts.data_ptr(),
            len(self.parts),
            tokens.num_slots,
            len(x),
            self.in_features,
            out.shape[1],
            torch.get_num_threads(),
        )


def make_bank(
    memory: Tensor, ranks: Tensor, in_features: int, parts: Sequence[LoraPart]
) -> LoraBank:
    """Make the bank of a product; dtypes other than bfloat16 and float32 use the reference."""
    kind = CppBank if memory.dtype in DTYPES else TorchBank
    return kind(memory, ranks, in_features, parts)
