"""Linear layers in Triton whose rows get the same bits in every batch; the weight is not packed.

An element of the result is one chain of tensor-core steps over the columns of the weight, in order,
never split among programs. The tile of a product depends on the number of tokens, but must not
affect the bits. So every tile has weight rows on the side of the matrix instruction that is 64 rows
high, and tokens on the side that may be 8 to 256 wide. All tiles then use one instruction (on
Hopper `wgmma.m64nNk16`), each adding 16 columns to the same accumulator.

With tokens on the other side, only long prompts would be faster, and few tokens would need another
instruction, whose internal rounding differs. float32 is multiplied and added one column after
another, without tensor cores.

Whether tiles give the same bits depends on the compiler and the GPU, so it is measured: `python -m
benchmarks.h200.deterministic` compares them bit by bit.

Source: He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference" (2025), which uses
one fixed tile for every shape.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.linear.reference import TorchLinear
from kernels.triton_support.device import SharedMemory, shared_memory
from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs

# Number of consecutive programs that use the same weight rows for different tokens, so that the
# rows stay in the cache.
_GROUP_TOKENS = 8
# About the number of programs that run on the device at once. With fewer and larger blocks, part of
# the device would be idle.
_FULL_DEVICE = 128


@dataclass(frozen=True)
class Tile:
    """The sizes of a product's tile.

    Attributes:
        rows, tokens, columns: weight rows, tokens and columns of a block.
        num_warps, num_stages: warps of a program, and blocks in flight.
    """

    rows: int
    tokens: int
    columns: int
    num_warps: int
    num_stages: int


_WIDE_FLOATS = (Tile(64, 16, 32, 4, 3), Tile(64, 64, 32, 4, 3))
_FEW_TOKENS = (Tile(64, 16, 128, 4, 4), Tile(64, 32, 128, 4, 4), Tile(64, 64, 64, 4, 4))
_MANY_TOKENS = Tile(128, 128, 64, 8, 3)
_MOST_TOKENS = Tile(128, 256, 64, 8, 3)


def tiles(dtype: torch.dtype) -> tuple[Tile, ...]:
    """Return every tile that `tile_of` may choose for a dtype."""
    if dtype is torch.float32:
        return _WIDE_FLOATS
    return (*_FEW_TOKENS, _MANY_TOKENS, _MOST_TOKENS)


def tile_of(dtype: torch.dtype, num_tokens: int, out_features: int) -> Tile:
    """Return the tile of a product of `num_tokens` tokens."""
    if dtype is torch.float32:
        return _WIDE_FLOATS[num_tokens > _WIDE_FLOATS[0].tokens]
    for tile in _FEW_TOKENS:
        if num_tokens <= tile.tokens:
            return tile
    most = _MOST_TOKENS
    programs = triton.cdiv(num_tokens, most.tokens) * triton.cdiv(out_features, most.rows)
    return most if programs >= _FULL_DEVICE else _MANY_TOKENS


def stages_of(tile: Tile, dtype: torch.dtype, shared: SharedMemory) -> int:
    """Return how many of the tile's stages fit in shared memory.

    The number of stages does not change the result.
    """
    return shared.stages(tile.num_stages, (tile.rows + tile.tokens) * tile.columns * dtype.itemsize)


# The kernel is not specialized on the number of tokens, because 1 and multiples of 16 would
# otherwise need separate compilations.
@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one block of `BLOCK_N` features of `BLOCK_M` tokens."""
    program = tl.program_id(0)
    row_blocks = tl.cdiv(out_features, BLOCK_N)
    token_blocks = tl.cdiv(num_tokens, BLOCK_M)
    group = program // (row_blocks * GROUP)
    width = tl.minimum(token_blocks - group * GROUP, GROUP)
    within = program % (row_blocks * GROUP)
    feature = (within // width) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (group * GROUP + within % width) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Indices past an end repeat the last row, so that loads need no mask; they are not stored.
    weight_row = tl.minimum(feature, out_features - 1).to(tl.int64)
    x_row = tl.minimum(token, num_tokens - 1).to(tl.int64)
    weight_ptrs = weight_ptr + weight_row[:, None] * in_features
    x_ptrs = x_ptr + x_row[:, None] * in_features
    start_next(PDL)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        if EVEN_K:
            weight = tl.load(weight_ptrs + k[None, :])
            x = tl.load(x_ptrs + k[None, :])
        else:
            inside = (k < in_features)[None, :]
            weight = tl.load(weight_ptrs + k[None, :], mask=inside, other=0.0)
            x = tl.load(x_ptrs + k[None, :], mask=inside, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc=acc, input_precision=PRECISION)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=feature < out_features, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    tl.store(
        out_ptr + token.to(tl.int64)[None, :] * out_features + feature[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=(feature < out_features)[:, None] & (token < num_tokens)[None, :],
    )


def run(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """Return `x @ weight.T + bias`, computed with `tile`."""
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    out = x.new_empty(num_tokens, out_features)
    if num_tokens == 0:
        return out
    programs = triton.cdiv(out_features, tile.rows) * triton.cdiv(num_tokens, tile.tokens)
    _linear_kernel[(programs,)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_tokens,
        out_features,
        in_features,
        HAS_BIAS=bias is not None,
        EVEN_K=in_features % tile.columns == 0,
        PRECISION="ieee" if x.dtype is torch.float32 else "tf32",
        GROUP=_GROUP_TOKENS,
        BLOCK_N=tile.rows,
        BLOCK_M=tile.tokens,
        BLOCK_K=tile.columns,
        STAGES=stages_of(tile, x.dtype, shared_memory(x.device)),
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )
    return out


class InvariantLinear(TorchLinear):
    """A linear layer with an unpacked weight; our kernel serves every number of tokens."""

    implementation = "triton_invariant"

    def __call__(self, x: Tensor) -> Tensor:
        tile = tile_of(x.dtype, x.shape[0], self.out_features)
        return run(x, self.weight, self.bias, tile)


def pack(weight: Tensor, bias: Tensor | None) -> InvariantLinear:
    """Return a linear layer with the weight, made contiguous; see `kernels.linear.pack`."""
    return InvariantLinear(weight.contiguous(), bias)
