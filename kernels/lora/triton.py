"""LoRA adapters in Triton: one or two launches per product, in addition to the base model's.

The sizes of the launches depend on shapes alone, so CUDA graphs can hold them, whatever adapters
the tokens use. The list of tokens by adapter is made once for all products that have the same
tokens. Up to `FEW_TOKENS` tokens use the kernels of `kernels.lora.triton_few`, more tokens those of
`kernels.lora.triton_sgmv`. The first kernel multiplies by A ("shrink"). For few tokens, a launch of
the base product may do this instead (`Cut.order`). The second kernel multiplies by B ("expand"). It
also computes a gated activation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from kernels.activation import Activation
from kernels.linear import PackedLinear
from kernels.linear.triton import TritonLinear
from kernels.linear.triton_adapters import AdapterRows
from kernels.linear.triton_gemv import FurtherRows
from kernels.lora import LoraBank, LoraPart, TokenSlots
from kernels.lora.triton_few import expand_few_kernel, list_kernel, shrink_few_kernel
from kernels.lora.triton_sgmv import expand_kernel, listed, shrink_kernel
from kernels.triton_support.device import SharedMemory, multiprocessors, shared_memory
from kernels.triton_support.launch import launch_options
from kernels.triton_support.side_stream import forked, join
from kernels.triton_support.split_k import fits, space

# A matrix instruction has at least 16 rows.
_LEAST = 16
_MOST_SPLITS = 8
_WIDTH = 128
FEW_TOKENS = 64
# The least number of columns of a block, and the number of elements of a block that stays in
# registers.
_NARROWEST = 32
_MOST_IN_REGISTERS = 16_384
# The sizes of `cut_of` were measured with 8 and with 64 slots. With more slots than this, it
# returns those for 64.
_FEW_SLOTS = 16


@dataclass(frozen=True)
class Cut:
    """The sizes of programs for products of few tokens.

    Attributes:
        columns: columns of A in a block.
        steps: blocks of columns that a program multiplies.
        width: columns of B that a program multiplies.
        shares: number of programs that share the slots of a block of tokens.
        num_stages: blocks in flight, in both kernels.
        shrink_warps, expand_warps: warps of a program in each kernel.
        order: when tokens are shrunk: `first`, before the base product; `last`, after it; `beside`,
            at the same time on a separate stream; or `within` the launch of the base product. If
            the base product does not support `within` or would take longer
            (`TritonLinear.split_with_adapters`), tokens are shrunk `beside` it.
    """

    columns: int = 256
    steps: int = 1
    width: int = 128
    shares: int = 1
    num_stages: int = 3
    shrink_warps: int = 4
    expand_warps: int = 4
    order: str = "first"


class _Few(NamedTuple):
    """The list of a step's tokens that `kernels.lora.triton_few` describes.

    Attributes:
        list: the tokens sorted by slot and data about each block, int32, in that layout.
        ranks: the tensor of ranks from which the list was made.
        num_places: number of places in the list.
        size: tokens of a block.
        step: the part of `list` for `AdapterRows`; it is empty if there is only one token.
    """

    list: Tensor
    ranks: Tensor
    num_places: int
    size: int
    step: Tensor


def few_listed(tokens: TokenSlots, ranks: Tensor) -> _Few:
    """Return the list of a step's tokens, at most `FEW_TOKENS`; it is made at the first call."""
    made = tokens.derived
    if isinstance(made, _Few) and made.ranks is ranks:
        return made
    num_tokens, device = len(tokens), tokens.slots.device
    size = 1 if num_tokens == 1 else _LEAST
    num_places = max(size, triton.next_power_of_2(num_tokens))
    length = 4 * num_places + num_places // size
    further = 4 * num_places + 1 if num_tokens > 1 else 0
    of_step = torch.empty(length + further, dtype=torch.int32, device=device)
    list_kernel[(1,)](
        tokens.slots,
        ranks,
        of_step,
        num_tokens,
        tokens.num_slots,
        PLACES=num_places,
        BLOCK_M=size,
        num_warps=4,
    )
    tokens.derived = few = _Few(of_step, ranks, num_places, size, of_step[length:])
    return few


class TritonBank(LoraBank):
    """Adapters in any floating dtype, multiplied by Triton kernels."""

    def __init__(
        self, memory: Tensor, ranks: Tensor, in_features: int, parts: Sequence[LoraPart]
    ) -> None:
        super().__init__(memory, ranks, in_features, parts)
        self._precision = "ieee" if memory.dtype is torch.float32 else "tf32"
        self._rank_block = max(_LEAST, triton.next_power_of_2(memory.shape[1]))
        self._tiles: dict[int, Tensor] = {}
        self._even: dict[int, bool] = {}
        self._of_width(_WIDTH)
        # Whether the parts are the two halves of a gated product.
        self.gates = len(parts) == 2 and parts[0].num_rows == parts[1].num_rows == parts[1].first
        self.cut: Cut | None = None

    def _of_width(self, width: int) -> Tensor:
        """Return tiles of up to `width` columns (see `expand_kernel`), made at the first call."""
        if width not in self._tiles:
            tiles = self._list_tiles(width)
            self._tiles[width] = torch.tensor(tiles, dtype=torch.int32, device=self.memory.device)
            self._even[width] = all(
                tile[3] == width and tile[1] % 16 == tile[2] % 16 == 0 for tile in tiles
            )
        return self._tiles[width]

    def _list_tiles(self, most: int) -> list[tuple[int, int, int, int]]:
        tiles = []
        in_memory = len(self.parts) * self.in_features
        for index, part in enumerate(self.parts):
            for start in range(0, part.num_rows, most):
                width = min(most, part.num_rows - start)
                tiles.append((index, part.first + start, in_memory + start, width))
            in_memory += part.num_rows
        return tiles

    def _num_splits(self, num_tokens: int, size: int, columns: int) -> int:
        blocks = -(-num_tokens // size) * len(self.parts)
        wanted = 2 * multiprocessors(self.memory.device) // blocks
        most = min(_MOST_SPLITS, self.in_features // (2 * columns))
        return max(1, min(wanted, most))

    def add(self, out: Tensor, x: Tensor, tokens: TokenSlots) -> None:
        num_tokens = len(x)
        assert x.is_contiguous()
        assert out.is_contiguous()
        assert num_tokens == len(out) == len(tokens)
        if not num_tokens:
            return
        if num_tokens <= FEW_TOKENS:
            cut = self._cut(num_tokens)
            self._expand(out, self._shrink(x, tokens, cut), tokens, cut)
            return
        self._expand_many(out, self._shrink_many(x, tokens), tokens)

    def _shrink_many(self, x: Tensor, tokens: TokenSlots) -> Tensor:
        """Return the shrunk tokens, `[parts, places, ranks]`, the dtype of the adapters."""
        memory, num_tokens, parts, ranks = self.memory, len(x), len(self.parts), self._rank_block
        order, block_slot, size = listed(tokens)
        columns = 32 if memory.dtype is torch.float32 else 128
        splits, blocks = self._num_splits(num_tokens, size, columns), len(block_slot)
        while splits > 1 and not fits(blocks * parts, size * ranks, splits):
            splits //= 2
        shrunk = memory.new_empty(parts, len(order), ranks)
        partials, arrived = order, order
        if splits > 1:
            partials, arrived = space(x.device, blocks * parts, size * ranks, splits)
        shrink_kernel[(blocks, parts, splits)](
            x,
            memory,
            self.ranks,
            order,
            block_slot,
            shrunk,
            partials,
            arrived,
            num_tokens,
            len(order),
            tokens.num_slots,
            self.in_features,
            memory.stride(0),
            memory.stride(1),
            EVEN_K=self.in_features % columns == 0,
            PARTS=parts,
            SPLIT=splits,
            RANKS=ranks,
            BLOCK_M=size,
            BLOCK_K=columns,
            PRECISION=self._precision,
            num_warps=4,
            **launch_options(x.device),
        )
        return shrunk

    def _expand_many(
        self,
        product: Tensor,
        shrunk: Tensor,
        tokens: TokenSlots,
        activation: Activation | None = None,
    ) -> Tensor:
        """Add adapters to a product in place and return it, or return its gated activation."""
        memory, (num_tokens, rows) = self.memory, product.shape
        order, block_slot, size = listed(tokens)
        tiles, out = self._of_width(_WIDTH), product
        num_tiles = len(tiles)
        if activation is not None:
            out = product.new_empty(num_tokens, rows // 2)
            num_tiles = triton.cdiv(rows // 2, _WIDTH)
        expand_kernel[(len(block_slot), num_tiles)](
            product,
            out,
            memory,
            self.ranks,
            order,
            block_slot,
            shrunk,
            tiles,
            num_tokens,
            len(order),
            tokens.num_slots,
            self.in_features,
            rows,
            rows // 2,
            memory.stride(0),
            memory.stride(1),
            RANKS=self._rank_block,
            BLOCK_M=size,
            BLOCK_N=_WIDTH,
            ACTIVATION=activation,
            PRECISION=self._precision,
            num_warps=4,
            **launch_options(product.device),
        )
        return out

    def product(self, base: PackedLinear, x: Tensor, tokens: TokenSlots) -> Tensor:
        if not 0 < len(x) <= FEW_TOKENS:
            return super().product(base, x, tokens)
        cut = self._cut(len(x))
        out, made, ahead = self._both(base, x, tokens, cut)
        return self._expand(out, made, tokens, cut, ahead=ahead)

    def gated(
        self, base: PackedLinear, x: Tensor, activation: Activation, tokens: TokenSlots
    ) -> Tensor:
        if not self.gates or not len(x):
            return super().gated(base, x, activation, tokens)
        if len(x) > FEW_TOKENS:
            product = base(x).contiguous()
            return self._expand_many(product, self._shrink_many(x, tokens), tokens, activation)
        cut = self._cut(len(x))
        out, made, ahead = self._both(base, x, tokens, cut)
        return self._expand(out, made, tokens, cut, activation, ahead=ahead)

    def _cut(self, num_tokens: int) -> Cut:
        """Return the sizes for products of few tokens, which fit into a program's shared memory."""
        memory = self.memory
        cut = self.cut or cut_of(self.in_features, num_tokens, len(memory), gates=self.gates)
        room = shared_memory(memory.device)
        return fitted(cut, self._rank_block, 1 if num_tokens == 1 else _LEAST, memory.dtype, room)

    def _both(
        self, base: PackedLinear, x: Tensor, tokens: TokenSlots, cut: Cut
    ) -> tuple[Tensor, Tensor, bool]:
        """Compute the base product and the tokens' products with A, in the order of `cut`.

        Returns:
            The base product, contiguous; the products with A, as `_shrink` returns them; and the
            argument `ahead` for `_expand`.
        """
        order = cut.order
        if order == "within":
            both = self._within(base, x, tokens) if isinstance(base, TritonLinear) else None
            if both is not None:
                return both
            order = "beside"
        if order == "last":
            out = base(x).contiguous()
            return out, self._shrink(x, tokens, cut), False
        if order == "first":
            made = self._shrink(x, tokens, cut)
            return base(x).contiguous(), made, False
        few_listed(tokens, self.ranks)
        made = self._space(x, tokens, cut)
        with forked(x.device):
            self._shrink(x, tokens, cut, made)
        out = base(x).contiguous()
        join(x.device)
        return out, made, False

    def _within(
        self, base: TritonLinear, x: Tensor, tokens: TokenSlots
    ) -> tuple[Tensor, Tensor, bool] | None:
        """Return the result of `_both` from one launch; `None` if the base does not support it."""
        few, parts, ranks = few_listed(tokens, self.ranks), len(self.parts), self._rank_block
        if len(x) == 1:
            made = torch.empty(parts, ranks, dtype=torch.float32, device=x.device)
            further = FurtherRows(self.memory, few.list[2:], few.list[3:], parts, made)
            product = base.with_further(x, further)
            return None if product is None else (product, made[None, :, None], False)
        most = min(len(x), tokens.num_slots)
        split = base.split_with_adapters(
            len(x), self.memory.dtype, most * parts * ranks, multiprocessors(x.device)
        )
        if not split:
            return None
        shape = split, parts, few.num_places, ranks
        made = torch.empty(shape, dtype=torch.float32, device=x.device)
        return base.with_adapters(x, AdapterRows(self.memory, few.step, most, made)), made, True

    def _space(self, x: Tensor, tokens: TokenSlots, cut: Cut) -> Tensor:
        splits = triton.cdiv(self.in_features, cut.columns * cut.steps)
        shape = splits, len(self.parts), few_listed(tokens, self.ranks).num_places, self._rank_block
        return torch.empty(shape, dtype=torch.float32, device=x.device)

    def _shrink(
        self, x: Tensor, tokens: TokenSlots, cut: Cut, made: Tensor | None = None
    ) -> Tensor:
        """Return the shrunk tokens as partial sums over groups of A's columns.

        The layout is that of `shrink_few_kernel`.
        """
        assert x.is_contiguous()
        assert len(x) == len(tokens)
        few, memory = few_listed(tokens, self.ranks), self.memory
        if made is None:
            made = self._space(x, tokens, cut)
        shrink_few_kernel[(few.num_places // few.size * cut.shares, len(self.parts), len(made))](
            x,
            memory,
            few.list,
            made,
            len(x),
            few.num_places,
            self.in_features,
            memory.stride(0),
            memory.stride(1),
            EVEN_K=self.in_features % (cut.columns * cut.steps) == 0,
            PARTS=len(self.parts),
            STEPS=cut.steps,
            RANKS=self._rank_block,
            SHARES=cut.shares,
            BLOCK_M=few.size,
            BLOCK_K=cut.columns,
            STAGES=cut.num_stages,
            PRECISION=self._precision,
            num_warps=cut.shrink_warps,
            **launch_options(x.device),
        )
        return made

    def _expand(
        self,
        product: Tensor,
        made: Tensor,
        tokens: TokenSlots,
        cut: Cut,
        activation: Activation | None = None,
        *,
        ahead: bool = False,
    ) -> Tensor:
        """Add adapters to a product in place and return it, or return its gated activation."""
        assert product.is_contiguous()
        few, memory = few_listed(tokens, self.ranks), self.memory
        num_tokens, rows = product.shape
        tiles, half = self._of_width(cut.width), rows // 2
        is_even = self._even[cut.width] and rows % 16 == 0
        if activation is None:
            out, num_tiles = product, len(tiles)
        else:
            out, num_tiles = product.new_empty(num_tokens, half), triton.cdiv(half, cut.width)
        expand_few_kernel[(few.num_places // few.size * cut.shares, num_tiles)](
            product,
            out,
            memory,
            few.list,
            made,
            tiles,
            num_tokens,
            few.num_places,
            self.in_features,
            rows,
            half,
            memory.stride(0),
            memory.stride(1),
            EVEN_N=is_even,
            PARTS=len(self.parts),
            SPLIT=len(made),
            RANKS=self._rank_block,
            SHARES=cut.shares,
            BLOCK_M=few.size,
            BLOCK_N=cut.width,
            ACTIVATION=activation,
            STAGES=cut.num_stages,
            PRECISION=self._precision,
            AHEAD=ahead,
            num_warps=cut.expand_warps,
            **launch_options(product.device),
        )
        return out


def cut_of(in_features: int, num_tokens: int, num_slots: int, *, gates: bool) -> Cut:
    """Return the sizes for products of few tokens, from `benchmarks.h200.adapter_products`.

    Args:
        in_features: columns of the weight.
        num_tokens: 1 to `FEW_TOKENS`.
        num_slots: slots of the device, the most adapters that the tokens may have.
        gates: whether the product's halves are gate and up. A program multiplies columns of both.
    """
    if num_tokens == 1:
        steps = triton.cdiv(in_features, 16 * 256)
        return Cut(256, steps, 32, 1, num_stages=1, expand_warps=1, order="within")
    steps = triton.cdiv(in_features, 8 * 256)
    if num_slots > _FEW_SLOTS:
        return Cut(256, steps, 128, 4, num_stages=3, order="within")
    if gates:
        return Cut(256, steps, 128, 1, num_stages=2, expand_warps=8, order="within")
    return Cut(256, steps, 128, 2, num_stages=2, order="within")


@cache
def fitted(cut: Cut, ranks: int, size: int, dtype: torch.dtype, room: SharedMemory) -> Cut:
    """Return `cut`, with narrower blocks if high ranks leave too little room for its blocks.

    Args:
        cut: the sizes for a low rank.
        ranks: ranks of a block, the most that an adapter may have.
        size: tokens of a block.
        dtype: dtype of tokens and adapters.
        room: shared memory of the device.

    Returns:
        Sizes with the same number of parts. The number of stages is smaller only if even the
        narrowest blocks do not fit.
    """
    if size == 1:
        # These blocks stay in registers.
        while cut.columns > _NARROWEST and ranks * cut.columns > _MOST_IN_REGISTERS:
            cut = replace(cut, columns=cut.columns // 2, steps=cut.steps * 2)
        return cut

    def stages(rows: int, width: int) -> int:
        return room.stages(cut.num_stages, rows * width * dtype.itemsize)

    while cut.columns > _NARROWEST and stages(ranks + size, cut.columns) < cut.num_stages:
        cut = replace(cut, columns=cut.columns // 2, steps=cut.steps * 2)
    while cut.width > _NARROWEST and stages(ranks, cut.width) < cut.num_stages:
        cut = replace(cut, width=cut.width // 2)
    least = min(stages(ranks + size, cut.columns), stages(ranks, cut.width))
    return replace(cut, num_stages=least)


def make_bank(
    memory: Tensor, ranks: Tensor, in_features: int, parts: Sequence[LoraPart]
) -> LoraBank:
    """Return the bank (A and B of all adapters) of a linear layer; see `kernels.lora.make_bank`."""
    return TritonBank(memory, ranks, in_features, parts)
