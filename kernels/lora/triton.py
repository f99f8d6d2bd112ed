"""Adapters in Triton: two launches a product, whose number of programs depends on shapes alone.

CUDA graphs can therefore hold them, whatever adapters the tokens use. The list of tokens by adapter
is made once for all products that the same tokens pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.experts.triton import most_blocks
from kernels.experts.triton_kernels import sort_kernel
from kernels.lora import LoraBank, LoraPart, TokenSlots
from kernels.lora.triton_sgmv import expand_kernel, shrink_kernel
from kernels.triton_support.device import multiprocessors
from kernels.triton_support.launch import launch_options

# A matrix instruction has at least 16 rows.
_LEAST = 16
# From this many tokens on, blocks are larger: most of their rows are then in use.
_MANY_TOKENS = 512
_MANY_BLOCK = 64
_CHUNK = 1024
_MOST_SPLITS = 8
_WIDTH = 128


class _Listed(NamedTuple):
    """Tokens by slot, in blocks of `size`.

    Attributes:
        order: the token at each place; the number of tokens for padding.
        block_slot: the slot of each block, -1 for one without tokens.
    """

    order: Tensor
    block_slot: Tensor
    size: int


def listed(tokens: TokenSlots) -> _Listed:
    """Return the step's list, made at the first call."""
    if isinstance(tokens.derived, _Listed):
        return tokens.derived
    num_tokens, num_slots, device = len(tokens), tokens.num_slots, tokens.slots.device
    size = _LEAST if num_tokens < _MANY_TOKENS else _MANY_BLOCK
    num_blocks = most_blocks(num_tokens, num_slots, size)
    order = torch.empty(num_blocks * size, dtype=torch.int32, device=device)
    block_slot = torch.empty(num_blocks, dtype=torch.int32, device=device)
    sort_kernel[(num_slots,)](
        # Tokens of no slot are listed nowhere.
        torch.where(tokens.slots < 0, num_slots, tokens.slots),
        order,
        block_slot,
        num_tokens,
        num_blocks,
        num_slots,
        BLOCK_M=size,
        CHUNK=_CHUNK,
        BINS=triton.next_power_of_2(num_slots + 1),
        num_warps=4,
    )
    tokens.derived = made = _Listed(order, block_slot, size)
    return made


class TritonBank(LoraBank):
    """Adapters of any float type."""

    def __init__(
        self, memory: Tensor, ranks: Tensor, in_features: int, parts: Sequence[LoraPart]
    ) -> None:
        super().__init__(memory, ranks, in_features, parts)
        self._rank_block = max(_LEAST, triton.next_power_of_2(memory.shape[1]))
        self._tiles = torch.tensor(
            self._list_tiles(), dtype=torch.int32, device=memory.device
        ).contiguous()

    def _list_tiles(self) -> list[tuple[int, int, int, int]]:
        tiles = []
        in_memory = len(self.parts) * self.in_features
        for index, part in enumerate(self.parts):
            for start in range(0, part.num_rows, _WIDTH):
                width = min(_WIDTH, part.num_rows - start)
                tiles.append((index, part.first + start, in_memory + start, width))
            in_memory += part.num_rows
        return tiles

    def _num_splits(self, num_tokens: int, size: int, columns: int) -> int:
        blocks = -(-num_tokens // size) * len(self.parts)
        wanted = 2 * multiprocessors(self.memory.device) // blocks
        most = min(_MOST_SPLITS, self.in_features // (2 * columns))
        return max(1, min(wanted, most))

    def add(self, out: Tensor, x: Tensor, tokens: TokenSlots) -> None:
        num_tokens, memory = len(x), self.memory
        assert x.is_contiguous()
        assert out.is_contiguous()
        assert num_tokens == len(out) == len(tokens)
        if not num_tokens:
            return
        order, block_slot, size = listed(tokens)
        columns = 32 if memory.dtype is torch.float32 else 128
        splits, parts = self._num_splits(num_tokens, size, columns), len(self.parts)
        shape = (splits, parts, len(order), self._rank_block)
        made = torch.empty(shape, dtype=torch.float32, device=x.device)
        precision = "ieee" if memory.dtype is torch.float32 else "tf32"
        options = launch_options(x.device)
        shrink_kernel[(len(block_slot), parts, splits)](
            x,
            memory,
            self.ranks,
            order,
            block_slot,
            made,
            num_tokens,
            len(order),
            self.in_features,
            memory.stride(0),
            memory.stride(1),
            EVEN_K=self.in_features % columns == 0,
            PARTS=parts,
            SPLIT=splits,
            RANKS=self._rank_block,
            BLOCK_M=size,
            BLOCK_K=columns,
            PRECISION=precision,
            num_warps=4,
            **options,
        )
        expand_kernel[(len(block_slot), len(self._tiles))](
            out,
            memory,
            self.ranks,
            order,
            block_slot,
            made,
            self._tiles,
            num_tokens,
            len(order),
            out.shape[1],
            memory.stride(0),
            memory.stride(1),
            PARTS=parts,
            SPLIT=splits,
            RANKS=self._rank_block,
            BLOCK_M=size,
            BLOCK_N=_WIDTH,
            PRECISION=precision,
            num_warps=4,
            **options,
        )


def make_bank(
    memory: Tensor, ranks: Tensor, in_features: int, parts: Sequence[LoraPart]
) -> LoraBank:
    """See `kernels.lora.make_bank`."""
    return TritonBank(memory, ranks, in_features, parts)
