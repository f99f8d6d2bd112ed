"""Adapters in plain torch: one after the other."""

from collections.abc import Sequence

from torch import Tensor

from kernels.lora import LoraBank, LoraPart, TokenSlots


class TorchBank(LoraBank):
    """Multiplies the tokens of one slot after those of another."""

    def add(self, out: Tensor, x: Tensor, tokens: TokenSlots) -> None:
        for slot in tokens.slots.unique().tolist():
            if slot < 0:
                continue
            places = (tokens.slots == slot).nonzero().squeeze(1)
            rank = int(self.ranks[slot])
            mine = x.index_select(0, places).float()
            for index, part in enumerate(self.parts):
                shrunk = mine @ self.shrinks(index)[slot, :rank].float().T
                added = shrunk @ self.expands(index)[slot, :rank].float()
                rows = slice(part.first, part.first + part.num_rows)
                out[places, rows] = (out[places, rows].float() + added).to(out.dtype)


def make_bank(
    memory: Tensor, ranks: Tensor, in_features: int, parts: Sequence[LoraPart]
) -> LoraBank:
    """See `kernels.lora.make_bank`."""
    return TorchBank(memory, ranks, in_features, parts)
