"""Linear layers in Triton for few tokens and in cuBLAS for more; the weight is not packed.

A single token has a kernel of its own, `kernels.linear.triton_gemv`, and so does the gated product
of many tokens, `kernels.linear.triton_gated`. The gated product of few tokens is computed here.
With 64 tokens it makes a step 3% shorter for a 0.5B model and 0.4% for an 8B model; with one token
it makes no difference.

A product with up to 64 tokens reads the weight once and is limited by memory. Two things matter.
Every multiprocessor must keep enough loads in flight. The kernel must start while the previous one
still runs, which cuBLAS's kernels do not. If a weight has too few rows to fill the device, several
programs share the columns of one block (`kernels.triton_support.split_k`).

`tile_of` returns the tile for a weight's shape. The tiles were measured on an H200
(`benchmarks/h200/linear.py`); those for more than 16 tokens were measured in whole steps.
Milliseconds of a step of an 8B and of a 0.5B model with cuBLAS and with this kernel:

    shape  32 tokens      64 tokens
    8B     5.05 and 4.73  5.30 and 5.15
    0.5B   1.11 and 0.91  1.11 and 1.04

With 128 tokens the kernel is not faster. cuBLAS is not faster for any of the shapes in the table.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913, C901, SIM102 a kernel's parameters, and its variants, of which one is compiled

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.activation import Activation, act_and_mul
from kernels.activation.triton import activated
from kernels.linear import GATED_TOKENS
from kernels.linear.reference import TorchLinear
from kernels.linear.triton_adapters import AdapterRows, adapter_rows, store_shrunk
from kernels.linear.triton_gated import gated
from kernels.linear.triton_gated import supports as supports_gated
from kernels.linear.triton_gemv import MAX_IN_FEATURES, FurtherRows, gemv
from kernels.triton_support.device import SharedMemory, shared_memory
from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs
from kernels.triton_support.split_k import leave_part, space, sum_parts

MAX_TOKENS = 64
# Tokens of a block; the smallest block that holds all of a product's tokens is used.
TOKEN_BLOCKS = (16, 32, 64)


@dataclass(frozen=True)
class Tile:
    """The sizes of a product's tile.

    Attributes:
        block_n, block_k: weight rows and columns of a block.
        num_warps: warps of a program.
        num_stages: blocks in flight, fewer if shared memory is small.
        split_k: number of programs that share the columns of a block of rows.
        block_m: tokens of a block. With 0, one block holds all tokens, so that the weight is read
            once. Smaller blocks are faster for a small weight, for two reasons: it stays in the L2
            cache, where several programs read it again; and with more programs, loading starts
            sooner.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1
    block_m: int = 0


@triton.jit(do_not_specialize=["num_tokens", "further"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    memory_ptr,
    step_ptr,
    made_ptr,
    num_tokens,
    out_features,
    in_features,
    further,
    slot_stride,
    rank_stride,
    PARTS: tl.constexpr,
    PLACES: tl.constexpr,
    RANKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply `BLOCK_M` tokens by `BLOCK_N` rows of the weight, or by a part of their columns.

    The first `further` blocks have rows of adapters (`AdapterRows`) instead, if `RANKS` is not 0.
    """
    block = tl.program_id(0) - further
    part = tl.program_id(1)
    if ACTIVATION is not None:
        # The block has as many rows of gate as of up, stacked to one matrix, so that there is one
        # stream of loads.
        place = tl.arange(0, BLOCK_N)
        half: tl.constexpr = BLOCK_N // 2
        width = out_features // 2
        within = block * half + place % half
        # Rows past an end belong to another block, and their products are not stored.
        feature = place // half * width + within
    else:
        feature = block * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    share = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = part * share
    end = tl.minimum(begin + share, in_features)
    weight_row = weight_ptr + feature.to(tl.int64)[:, None] * in_features
    is_row = feature < out_features
    if RANKS == 0:
        start_next(PDL)
    wait_for_inputs(PDL)
    if RANKS > 0:
        # The next kernel multiplies by the adapters' other matrices. It starts when all kernels
        # before this one have ended, so that it can read the list of adapters while this one runs.
        start_next(PDL)
        row = (block + further) * BLOCK_N + tl.arange(0, BLOCK_N)
        if block < 0:
            weight_row, is_row = adapter_rows(
                row, memory_ptr, step_ptr, in_features, slot_stride, rank_stride,
                PARTS, PLACES, RANKS,
            )  # fmt: skip
            # A block without an adapter has no columns to multiply.
            end = tl.where(tl.max(is_row.to(tl.int32), 0) > 0, end, begin)
    x_row = x_ptr + token[:, None] * in_features
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        weight_mask = is_row[:, None]
        x_mask = (token < num_tokens)[:, None]
        if not EVEN_K:
            weight_mask = weight_mask & (k < in_features)[None, :]
            x_mask = x_mask & (k < in_features)[None, :]
        weight = tl.load(
            weight_row + k[None, :], mask=weight_mask, other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_row + k[None, :], mask=x_mask, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc=acc)
    if RANKS > 0:
        if block < 0:
            store_shrunk(
                acc, row, token, part, step_ptr, made_ptr, num_tokens, PARTS, PLACES, RANKS
            )
            return
    if SPLIT_K > 1:
        place = tl.program_id(2) * (tl.num_programs(0) - further) + block
        before = leave_part(acc, partial_ptr, arrived_ptr, place, part, SPLIT_K, BLOCK_N, BLOCK_M)
        if before != SPLIT_K - 1:
            return
        acc = sum_parts(partial_ptr, arrived_ptr, place, SPLIT_K, BLOCK_N, BLOCK_M)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=feature < out_features, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    if ACTIVATION is not None:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, BLOCK_M)), (1, 2, 0)))
        # The gate is rounded like a product, and then as in `kernels.activation.triton`.
        gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
        up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
        column = block * half + tl.arange(0, half)
        tl.store(
            out_ptr + token[None, :] * width + column[:, None],
            (activated(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty),
            mask=(column < width)[:, None] & (token < num_tokens)[None, :],
        )
        return
    tl.store(
        out_ptr + token[None, :] * out_features + feature[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=(feature < out_features)[:, None] & (token < num_tokens)[None, :],
    )


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: Tile,
    *,
    gated: Activation | None = None,
    out: Tensor | None = None,
    adapters: AdapterRows | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias` for at most `MAX_TOKENS` rows of float16 or bfloat16.

    Args:
        x: `[num_tokens, in_features]`, contiguous.
        weight: `[out_features, in_features]`, contiguous, the dtype of `x`.
        bias: `[out_features]`, or `None`.
        tile: sizes of the blocks that a program multiplies.
        gated: an activation, if the result is to be `gated(gate) * up` of the product's two halves.
            The tile must not split columns then.
        out: a contiguous tensor to which the result is written; `None` for a new tensor.
        adapters: rows of adapters to multiply, too; not with `gated`.
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    assert num_tokens <= MAX_TOKENS
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    assert gated is None or tile.split_k == 1
    if out is None:
        out = x.new_empty(num_tokens, out_features if gated is None else out_features // 2)
    block_m = tile.block_m or token_block(num_tokens)
    stages = stages_of(tile, block_m, shared_memory(x.device))
    blocks, token_blocks = triton.cdiv(out_features, tile.block_n), triton.cdiv(num_tokens, block_m)
    partials, arrived = out, out
    if tile.split_k > 1:
        partials, arrived = space(
            x.device, blocks * token_blocks, tile.block_n * block_m, tile.split_k
        )
    further = places = ranks = parts = slot_stride = rank_stride = 0
    others: tuple[Tensor, ...] = (weight, out, out)
    if adapters is not None:
        assert gated is None
        others = adapters.memory, adapters.step, adapters.made
        _, parts, places, ranks = adapters.made.shape
        slot_stride, rank_stride, _ = adapters.memory.stride()
        further = triton.cdiv(adapters.most * parts * ranks, tile.block_n)
    linear_kernel[(further + blocks, tile.split_k, token_blocks)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        partials,
        arrived,
        *others,
        num_tokens,
        out_features,
        in_features,
        further,
        slot_stride,
        rank_stride,
        PARTS=parts,
        PLACES=places,
        RANKS=ranks,
        HAS_BIAS=bias is not None,
        EVEN_K=in_features % tile.block_k == 0,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT_K=tile.split_k,
        STAGES=stages,
        ACTIVATION=gated,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )
    return out


def stages_of(tile: Tile, block_m: int, shared: SharedMemory) -> int:
    """Return how many of the tile's stages fit in shared memory, for float16 or bfloat16."""
    return shared.stages(tile.num_stages, (tile.block_n + block_m) * tile.block_k * 2)


def token_block(num_tokens: int) -> int:
    """Return the smallest block of tokens that holds `num_tokens`, at most `MAX_TOKENS`."""
    return next(block for block in TOKEN_BLOCKS if num_tokens <= block)


def tile_of(out_features: int, in_features: int, block_m: int) -> Tile:
    """Return the tile of a weight for up to `block_m` tokens."""
    if block_m > 16:
        return _tile_of_many(out_features, in_features, block_m)
    if out_features >= 8192:
        return Tile(64, 128, 4, 4)
    if out_features < 2048 and in_features > 2048:
        return Tile(32, 256, 4, 4, 4)
    if 2048 <= out_features <= 4224:
        # One program per multiprocessor.
        return Tile(32, 256, 4, 5)
    return Tile(16, 256, 2, 4)


def _tile_of_many(out_features: int, in_features: int, block_m: int) -> Tile:
    if out_features >= 65536:
        return Tile(128, 64, 4, 4)
    # Large blocks read the tokens less often. They need enough blocks, or short ones, to fill the
    # device.
    if in_features <= 1024 and out_features >= 8192:
        return Tile(128, 64, 4, 6)
    if out_features >= 16896:
        return Tile(128, 128, 8, 4)
    if out_features < 2048:
        # Few rows fill the device only if their tokens and columns are split.
        if in_features > 2048:
            return Tile(64, 256, 4, 4, 4, block_m // 2)
        return Tile(16, 128, 4, 4) if block_m == 32 else Tile(64, 128, 4, 4, 1, 16)
    split_k = 1 if out_features >= 6144 else 2 if out_features >= 3072 else 4
    return Tile(64, 128, 4, 4, split_k)


class TritonLinear(TorchLinear):
    """A linear layer with an unpacked weight; few tokens use our kernel, more tokens cuBLAS."""

    implementation = "triton"

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        max_streamed: int = MAX_IN_FEATURES,
        min_gated: int = GATED_TOKENS,
    ) -> None:
        """Keep the weight; set the limits of the kernels for one token and for gated products.

        Args:
            weight: `[out_features, in_features]`.
            bias: `[out_features]`, or None.
            max_streamed: most columns for the kernel of one token.
            min_gated: number of tokens from which on the gated product is one kernel.
        """
        super().__init__(weight, bias)
        self._min_gated = min_gated
        rows, columns = weight.shape
        halves = weight.dtype is not torch.float32
        self._streams = halves and columns <= max_streamed
        self._tiles = {m: tile_of(rows, columns, m) for m in TOKEN_BLOCKS} if halves else {}
        self._gates = supports_gated(weight)

    def __call__(self, x: Tensor) -> Tensor:
        product = self._of_few(x)
        return functional.linear(x, self.weight, self.bias) if product is None else product

    def write(self, x: Tensor, out: Tensor) -> None:
        if self._of_few(x, out) is not None:
            return
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)

    def with_further(self, x: Tensor, further: FurtherRows) -> Tensor | None:
        """Return one token's product in a launch that also multiplies other rows.

        Returns `None` if there are several tokens, or the kernel does not support the weight.
        """
        if x.shape[0] != 1 or not self._streams:
            return None
        return gemv(x, self.weight, self.bias, further=further)

    def split_with_adapters(
        self, num_tokens: int, dtype: torch.dtype, num_rows: int, num_multiprocessors: int
    ) -> int:
        """Return the `split_k` of a launch that also multiplies rows of adapters.

        Returns 0 if there is no such launch, or if its programs would need more waves (sets of
        programs that run at once) than those of the product alone. A program of a small product
        fills a multiprocessor, so one more wave would take as long as the product.
        """
        if not 1 < num_tokens <= MAX_TOKENS or not self._tiles or dtype != self.weight.dtype:
            return 0
        block_m, shared = token_block(num_tokens), shared_memory(self.weight.device)
        tile = self._tiles[block_m]
        block_m = tile.block_m or block_m
        stages = stages_of(tile, block_m, shared)
        resident = shared.size // ((tile.block_n + block_m) * tile.block_k * 2 * stages)
        at_once = num_multiprocessors * max(1, resident)
        alone = triton.cdiv(self.out_features, tile.block_n)
        both = alone + triton.cdiv(num_rows, tile.block_n)
        programs = tile.split_k * triton.cdiv(num_tokens, block_m)
        is_free = triton.cdiv(both * programs, at_once) == triton.cdiv(alone * programs, at_once)
        return tile.split_k if is_free else 0

    def with_adapters(self, x: Tensor, adapters: AdapterRows) -> Tensor:
        """Return the product in a launch that `split_with_adapters` allows."""
        tile = self._tiles[token_block(len(x))]
        return run(x, self.weight, self.bias, tile, adapters=adapters)

    def _of_few(self, x: Tensor, out: Tensor | None = None) -> Tensor | None:
        """Return the product, in `out` if given; `None` if our kernels do not support it."""
        num_tokens = x.shape[0]
        if num_tokens == 1 and self._streams:
            return gemv(x, self.weight, self.bias, out=out)
        if 0 < num_tokens <= MAX_TOKENS and self._tiles:
            tile = self._tiles[token_block(num_tokens)]
            return run(x, self.weight, self.bias, tile, out=out)
        return None

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        num_tokens = x.shape[0]
        if 1 < num_tokens <= MAX_TOKENS and self._tiles:
            tile = self._tiles[token_block(num_tokens)]
            if tile.split_k == 1:
                return run(x, self.weight, self.bias, tile, gated=activation)
        if num_tokens >= self._min_gated and self._gates:
            return gated(x, self.weight, self.bias, activation)
        return act_and_mul(self(x), activation)


def pack(weight: Tensor, bias: Tensor | None) -> TritonLinear:
    """Return a linear layer with the weight unchanged; see `kernels.linear.pack`."""
    return TritonLinear(weight, bias)
