"""Mixtures of experts in Triton: a sort by expert, two products and a sum.

A fifth kernel chooses the experts. The host never waits for the device, and all shapes follow from
the number of tokens alone, so CUDA graphs can hold the kernels. Each launch has as many programs as
any choice of experts could need; programs without work exit immediately. There are two intermediate
results: the rows of the gated products, `[num_tokens * num_chosen, intermediate_size]`, and the
rows of the second products.

Microseconds of a layer of Qwen1.5-MoE on an H200 (`benchmarks.h200.experts`):

    kernels                   1 token  64 tokens  8192 tokens
    these kernels                  36        258         1466
    torch's grouped products      105        463         2298
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import torch
import triton
from torch import Tensor
from torch.nn import functional

from kernels.activation import Gate
from kernels.experts import ExpertBiases, PackedExperts
from kernels.experts.plain import PlainExperts
from kernels.experts.triton_kernels import choose_kernel, product_kernel, sort_kernel, sum_kernel
from kernels.linear.triton_invariant import Tile
from kernels.triton_support.device import SharedMemory, shared_memory

_CHUNK = 1024
_BLOCK = 1024
# Each expert's program of `sort_kernel` reads all rows. From this product of rows and experts on, a
# sort is faster. On an H200, `sort_kernel` took 813 microseconds for 512 experts and 81,920 rows;
# launching the sort takes the host 600 microseconds.
MANY_READS = 2**25


# Tiles by the average number of tokens per expert, as an upper bound; chosen on an H200. With few
# tokens, weights are read at memory speed, with many loads in flight. Many tokens fill the largest
# matrix instructions.
TILES = (
    (16, Tile(64, 16, 128, 4, 4)),
    (32, Tile(64, 32, 128, 4, 4)),
    (96, Tile(64, 64, 64, 4, 4)),
    (None, Tile(128, 128, 64, 8, 3)),
)
# float32 does not use tensor cores.
FLOATS = Tile(32, 16, 32, 4, 2)
# One tile for every number of tokens, so that a row runs through the same instructions in every
# batch.
INVARIANT = Tile(64, 32, 64, 4, 4)


def tile_of(dtype: torch.dtype, num_rows: int, num_experts: int) -> Tile:
    """Return the tile for products of `num_rows` rows that `num_experts` experts share."""
    if dtype is torch.float32:
        return FLOATS
    for most, tile in TILES:
        if most is None or num_rows <= most * num_experts:
            return tile
    raise AssertionError("the last has no bound")


def stages_of(tile: Tile, dtype: torch.dtype, halves: int, shared: SharedMemory) -> int:
    """Return how many of the tile's pipeline stages fit in shared memory.

    `halves` is 2 for weights with gate and up, otherwise 1. The number of stages does not change
    the result.
    """
    block_bytes = (halves * tile.rows + tile.tokens) * tile.columns * dtype.itemsize
    return shared.stages(tile.num_stages, block_bytes)


def most_blocks(num_rows: int, num_experts: int, tokens: int) -> int:
    """Return the most blocks of `tokens` rows, if each expert's rows are padded to whole blocks."""
    return (num_rows + min(num_rows, num_experts) * (tokens - 1)) // tokens


def sort_by_expert(
    ids: Tensor, num_experts: int, size: int, many_reads: int = MANY_READS
) -> tuple[Tensor, Tensor]:
    """List the rows by expert, in ascending order; each expert's rows are padded to whole blocks.

    Args:
        ids: `[num_rows]` int64, each row's expert. Rows with the id `num_experts` are not listed.
        num_experts: number of experts.
        size: rows of a block.
        many_reads: if the product of rows and experts is at least this number, torch sorts the
            rows; otherwise `sort_kernel` lists them.

    Returns:
        New tensors `order` and `block_expert`; see `SortedProduct`.
    """
    num_rows = len(ids)
    num_blocks = most_blocks(num_rows, num_experts, size)
    order = torch.empty(num_blocks * size, dtype=torch.int32, device=ids.device)
    block_expert = torch.empty(num_blocks, dtype=torch.int32, device=ids.device)
    if num_rows * num_experts >= many_reads:
        _sort_many(ids, num_experts, size, order, block_expert)
        return order, block_expert
    sort_kernel[(num_experts,)](
        ids,
        order,
        block_expert,
        num_rows,
        num_blocks,
        num_experts,
        BLOCK_M=size,
        CHUNK=_CHUNK,
        BINS=triton.next_power_of_2(num_experts + 1),
        num_warps=4,
    )
    return order, block_expert


def _sort_many(
    ids: Tensor, num_experts: int, size: int, order: Tensor, block_expert: Tensor
) -> None:
    """Write the same lists as `sort_kernel`, but with torch's sort, for many rows and experts."""
    device = ids.device
    by_expert, rows = ids.to(torch.int32).sort(stable=True)
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=device)
    starts = torch.searchsorted(by_expert, experts)
    ends = starts[1:]
    last_blocks = torch.cumsum((ends - starts[:-1] + size - 1) // size, 0)
    # The difference between a row's place in the padded list and its place among the sorted rows.
    padding = functional.pad(last_blocks[:-1], (1, 0)) * size - starts[:-1]
    expert = by_expert.clamp(max=num_experts - 1).long()
    places = torch.arange(len(ids), device=device) + padding[expert]
    # Rows that are not listed are all written to one place after the list.
    places = torch.where(by_expert < num_experts, places, len(order))
    listed = torch.full((len(order) + 1,), len(ids), dtype=torch.int32, device=device)
    listed[places] = rows.to(torch.int32)
    order.copy_(listed[:-1])
    blocks = torch.arange(len(block_expert), device=device)
    found = torch.searchsorted(last_blocks, blocks, right=True)
    block_expert.copy_(torch.where(found < num_experts, found, -1))


@dataclass(frozen=True)
class SortedProduct:
    """One of the two products of an expert, for rows that are sorted by expert.

    Attributes:
        order: `[len(block_expert) * tile.tokens]` int32, the rows of `out`, sorted into blocks of
            one expert each. Padding is `len(out)`.
        block_expert: `[num_blocks]` int32, each block's expert; -1 for an unused block.
        tile: sizes of the block that a program computes.
        which: which of an expert's weights is multiplied.
        x: `[len(out) // rows_of_x, in_features]`, the input.
        out: `[num_rows, width]`, overwritten with the product.
        rows_of_x: number of rows of `out` that are computed from one row of `x`.
        activation: how gate and up are combined; `None` if the weights have no gate.
        bias: `[num_experts, rows of the weight]`, or `None`.
    """

    order: Tensor
    block_expert: Tensor
    tile: Tile
    which: Literal["gate_up", "down"]
    x: Tensor
    out: Tensor
    rows_of_x: int
    activation: Gate | None
    bias: Tensor | None

    @property
    def halves(self) -> int:
        """Number of weight rows for each column of `out`: two (gate and up) or one."""
        return 1 if self.activation is None else 2

    def launch(self) -> dict[str, Any]:
        """Return the keyword arguments that every kernel of this product takes."""
        return {
            # Without a bias this pointer is not read.
            "bias_ptr": self.out if self.bias is None else self.bias,
            "out_ptr": self.out,
            "order_ptr": self.order,
            "block_expert_ptr": self.block_expert,
            "num_rows": len(self.out),
            "width": self.out.shape[1],
            "in_features": self.x.shape[1],
            "ROWS_OF_X": self.rows_of_x,
            "ACTIVATION": self.activation,
            "HAS_BIAS": self.bias is not None,
            "EVEN_K": self.x.shape[1] % self.tile.columns == 0,
            "BLOCK_N": self.tile.rows,
            "BLOCK_M": self.tile.tokens,
            "num_warps": self.tile.num_warps,
        }

    @property
    def grid(self) -> tuple[int]:
        """Number of programs: one per block of rows and `tile.rows` rows of the weight."""
        return (len(self.block_expert) * triton.cdiv(self.out.shape[1], self.tile.rows),)


class SortedExperts(PackedExperts):
    """Sorts rows by expert and multiplies them twice; subclasses define how weights are stored.

    Attributes:
        inner_size: width of the gated product, `intermediate_size` on this rank.
    """

    inner_size: int

    def choose(
        self, logits: Tensor, num_chosen: int, *, sums_to_one: bool
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_experts = logits.shape
        ids = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=logits.device)
        weights = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=logits.device)
        if num_tokens:
            choose_kernel[(num_tokens,)](
                logits.contiguous(),
                ids,
                weights,
                num_experts,
                NUM_CHOSEN=num_chosen,
                SUMS_TO_ONE=sums_to_one,
                PLACES=triton.next_power_of_2(num_chosen),
                BLOCK=triton.next_power_of_2(num_experts),
                num_warps=1,
            )
        return ids, weights

    def run(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        activation: Gate,
        tile: Tile,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        """Compute the experts' sum with a given tile; see `PackedExperts.__call__`."""
        assert x.is_contiguous()
        num_tokens, num_chosen = expert_ids.shape
        num_rows, hidden = num_tokens * num_chosen, x.shape[1]
        out = torch.empty_like(x)
        if not num_tokens:
            return out
        ids, weights = expert_ids.contiguous(), weights.contiguous()
        order, block_expert = sort_by_expert(ids.view(-1), self.num_experts, tile.tokens)
        product = partial(SortedProduct, order, block_expert, tile)
        inner = x.new_empty(num_rows, self.inner_size)
        of_gate_up, of_down = biases or (None, None)
        self.multiply(product("gate_up", x, inner, num_chosen, activation, of_gate_up))
        made = x.new_empty(num_rows, hidden)
        self.multiply(product("down", inner, made, 1, None, of_down))
        sum_kernel[(num_tokens, triton.cdiv(hidden, _BLOCK))](
            made,
            ids,
            weights,
            out,
            hidden,
            self.num_experts,
            NUM_CHOSEN=num_chosen,
            BLOCK=_BLOCK,
            num_warps=4,
        )
        return out

    @abstractmethod
    def multiply(self, product: SortedProduct) -> None:
        """Multiply sorted rows by their experts' weights, and write the result to `product.out`."""


class CodeMatrix(Protocol):
    """The weight matrices of all experts, stacked along the rows and quantized to codes."""

    def tensors(self) -> list[Tensor]:
        """Return all tensors that a product reads."""

    def fits(self, other: Self) -> bool:
        """Whether `other` has the form of this matrix, so that `take` may copy it."""

    def take(self, other: Self) -> None:
        """Copy the tensors of `other` into those of this matrix."""


Matrix = TypeVar("Matrix", bound=CodeMatrix)


class ExpertsInCodes(SortedExperts, Generic[Matrix]):
    """Experts with quantized weights (codes).

    New codes are copied into the same memory, because CUDA graphs hold its addresses.

    Attributes:
        matrices: the matrices of all experts by name, `gate_up` and `down`.
    """

    def __init__(self, gate_up: Matrix, down: Matrix, num_experts: int, inner_size: int) -> None:
        """Keep the matrices of all experts.

        Args:
            gate_up: `[num_experts * 2 * intermediate_size, hidden_size]`, the rows of each expert's
                gate before those of its up.
            down: `[num_experts * hidden_size, intermediate_size]`.
            num_experts: number of experts on this rank.
            inner_size: `intermediate_size` on this rank.
        """
        self.num_experts, self.inner_size = num_experts, inner_size
        self.matrices = {"gate_up": gate_up, "down": down}

    def unpack(self) -> tuple[Tensor, Tensor]:
        found = [self.unpack_one(expert) for expert in range(self.num_experts)]
        return torch.stack([gate_up for gate_up, _ in found]), torch.stack([d for _, d in found])

    def repack(self, gate_up: Tensor, down: Tensor) -> None:  # noqa: ARG002
        """Raise an error: only quantized weights can replace quantized weights.

        Raises:
            ValueError: always; quantized weights are replaced by `replace`.
        """
        raise ValueError("floats cannot replace experts in codes; use `replace`")

    def replace(self, other: Self) -> bool:
        """Copy the codes of `other` into our memory; return false if dtype or layout differs."""
        if not all(mine.fits(other.matrices[name]) for name, mine in self.matrices.items()):
            return False
        for name, mine in self.matrices.items():
            mine.take(other.matrices[name])
        return True

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for matrix in self.matrices.values() for t in matrix.tensors())


class TritonExperts(SortedExperts, PlainExperts):
    """Experts whose weights are not quantized.

    If `is_invariant`, one tile is used for every number of tokens.
    """

    def __init__(self, gate_up: Tensor, down: Tensor, *, is_invariant: bool) -> None:
        super().__init__(gate_up, down)
        self.inner_size = down.shape[2]
        self._is_invariant = is_invariant

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        activation: Gate,
        biases: ExpertBiases | None = None,
    ) -> Tensor:
        assert x.dtype == self._gate_up.dtype
        num_rows = expert_ids.numel()
        if self._is_invariant:
            tile = FLOATS if x.dtype is torch.float32 else INVARIANT
        else:
            tile = tile_of(x.dtype, num_rows, self.num_experts)
        return self.run(x, expert_ids, weights, activation, tile, biases)

    def multiply(self, product: SortedProduct) -> None:
        multiply(product, self._gate_up if product.which == "gate_up" else self._down, 0)


def multiply(product: SortedProduct, weight: Tensor, first_expert: int) -> None:
    """Multiply the rows of consecutive experts.

    Args:
        product: the product of all experts.
        weight: `[num_experts, rows, in_features]`, contiguous, the weights of the consecutive
            experts.
        first_expert: index of the first of these experts.
    """
    x, tile, named = product.x, product.tile, product.launch()
    if product.bias is not None:
        named["bias_ptr"] = product.bias[first_expert:]
    product_kernel[product.grid](
        x,
        weight,
        **named,
        first_expert=first_expert,
        num_experts=len(weight),
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        BLOCK_K=tile.columns,
        STAGES=stages_of(tile, x.dtype, product.halves, shared_memory(x.device)),
    )


def pack_experts(gate_up: Tensor, down: Tensor, linear: str | None) -> PackedExperts:  # noqa: ARG001
    """Pack the experts of a layer; see `kernels.experts.pack_experts`."""
    return TritonExperts(gate_up, down, is_invariant=False)
