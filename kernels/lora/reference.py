"""LoRA adapters in plain torch: each slot multiplies all tokens.

A slot adds zeros to the tokens of other slots.

No operation depends on the content of tensors, so a CUDA graph may record the operations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.lora import LoraBank, LoraPart, TokenSlots


class TorchBank(LoraBank):
    """Multiplies all tokens by the matrices of one slot after the other."""

    def add(self, out: Tensor, x: Tensor, tokens: TokenSlots) -> None:
        wide, max_rank = x.float(), self.memory.shape[1]
        ranks = torch.arange(max_rank, device=x.device)
        for index, part in enumerate(self.parts):
            rows = out[:, part.first : part.first + part.num_rows]
            added = torch.zeros_like(rows, dtype=torch.float32)
            for slot in range(tokens.num_slots):
                is_mine, is_rank = tokens.slots == slot, ranks < self.ranks[slot]
                shrunk = wide @ self.shrinks(index)[slot].float().T
                shrunk = torch.where(is_mine[:, None] & is_rank, shrunk, 0.0)
                # The memory of ranks that are not in use may hold NaN.
                b = torch.where(is_rank[:, None], self.expands(index)[slot].float(), 0.0)
                added += shrunk @ b
            rows.copy_((rows.float() + added).to(out.dtype))


def make_bank(
    memory: Tensor, ranks: Tensor, in_features: int, parts: Sequence[LoraPart]
) -> LoraBank:
    """Return the bank (A and B of all adapters) of a linear layer; see `kernels.lora.make_bank`."""
    return TorchBank(memory, ranks, in_features, parts)
