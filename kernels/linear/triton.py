"""Linear layers for few tokens in Triton, more go to cuBLAS: the plain weight, nothing packed.

One token has a kernel of its own, `kernels.linear.triton_gemv`.

A product with up to 16 tokens reads the weight once and is as fast as memory is; what counts is
that every multiprocessor keeps enough loads in flight. Where a weight has too few rows to fill the
device, several programs share the columns of one block; the last of them to finish adds the parts
up in a fixed order, so that a result does not depend on timing.
`tile_of` holds which shapes are cut how, measured on an H200 (`benchmarks/h200/linear.py`); None is
a shape that cuBLAS does better.

Source of the last-arrival sum: stream-K (Osama et al., 2023).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel takes what it touches

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.linear.reference import TorchLinear
from kernels.linear.triton_gemv import MAX_IN_FEATURES, gemv
from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs

MAX_TOKENS = 16
# Room for the parts of a product whose columns are shared out: float32 numbers, blocks of rows.
_MAX_PARTIALS = 1024 * 1024
_MAX_BLOCKS = 8192


@dataclass(frozen=True)
class Tile:
    """How a product is cut.

    Attributes:
        block_n, block_k: weight rows and columns of a block.
        num_warps: of a program.
        num_stages: blocks in flight.
        split_k: programs that share the columns of a block of rows.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1


@triton.jit
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    out_features,
    in_features,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    part = tl.program_id(1)
    feature = block * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    share = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = part * share
    end = tl.minimum(begin + share, in_features)
    weight_row = weight_ptr + feature.to(tl.int64)[:, None] * in_features
    start_next(PDL)
    wait_for_inputs(PDL)
    x_row = x_ptr + token[:, None] * in_features
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        weight_mask = (feature < out_features)[:, None]
        x_mask = (token < num_tokens)[:, None]
        if not EVEN_K:
            weight_mask = weight_mask & (k < in_features)[None, :]
            x_mask = x_mask & (k < in_features)[None, :]
        weight = tl.load(
            weight_row + k[None, :], mask=weight_mask, other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_row + k[None, :], mask=x_mask, other=0.0)
        acc = tl.dot(weight, tl.trans(x), acc=acc)
    if SPLIT_K > 1:
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + token[None, :]
        first_ptr = partial_ptr + block * (SPLIT_K * BLOCK_N * BLOCK_M)
        tl.store(first_ptr + part * (BLOCK_N * BLOCK_M) + inner, acc)
        # All threads' parts are written before the count says so.
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu")
        if before != SPLIT_K - 1:
            return
        tl.store(arrived_ptr + block, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for other in tl.static_range(SPLIT_K):
            # Past the first-level cache: other multiprocessors wrote these.
            at = first_ptr + other * (BLOCK_N * BLOCK_M) + inner
            acc += tl.load(at, cache_modifier=".cg")
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=feature < out_features, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    tl.store(
        out_ptr + token[None, :] * out_features + feature[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=(feature < out_features)[:, None] & (token < num_tokens)[None, :],
    )


@cache
def _shared_space(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return room for parts and the counts of those that are there, 0 between products.

    One for all products of a device: a stream computes them one after the other, and graphs
    remember the address.
    """
    return (
        torch.empty(_MAX_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(_MAX_BLOCKS, dtype=torch.int32, device=device),
    )


def run(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """Return `x @ weight.T + bias` for at most 16 rows of float16 or bfloat16."""
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    assert num_tokens <= MAX_TOKENS
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    out = x.new_empty(num_tokens, out_features)
    blocks = triton.cdiv(out_features, tile.block_n)
    partials, arrived = out, out
    if tile.split_k > 1:
        partials, arrived = _shared_space(x.device)
        assert blocks * tile.block_n * MAX_TOKENS * tile.split_k <= _MAX_PARTIALS
        assert blocks <= _MAX_BLOCKS
    _linear_kernel[(blocks, tile.split_k)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        partials,
        arrived,
        num_tokens,
        out_features,
        in_features,
        HAS_BIAS=bias is not None,
        EVEN_K=in_features % tile.block_k == 0,
        BLOCK_M=MAX_TOKENS,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        SPLIT_K=tile.split_k,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )
    return out


def tile_of(out_features: int, in_features: int) -> Tile | None:
    """Return how a weight is cut, None for one that cuBLAS multiplies faster."""
    if out_features >= 8192:
        return Tile(64, 128, 4, 4)
    if out_features < 2048 and in_features > 2048:
        return Tile(32, 256, 4, 4, 4)
    if 2048 <= out_features <= 4224:
        # One program a multiprocessor.
        return Tile(32, 256, 4, 5)
    return Tile(16, 256, 2, 4)


class TritonLinear(TorchLinear):
    """The plain weight, multiplied by our kernel when there are few tokens."""

    implementation = "triton"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self._tile = tile_of(*weight.shape) if weight.dtype is not torch.float32 else None
        self._streams = self._tile is not None and weight.shape[1] <= MAX_IN_FEATURES
        # Not while a graph is captured, whose own memory it would be.
        if self._tile is not None and self._tile.split_k > 1:
            _shared_space(weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        if self._streams and x.shape[0] == 1:
            return gemv(x, self.weight, self.bias)
        if self._tile is None or not 0 < x.shape[0] <= MAX_TOKENS:
            return functional.linear(x, self.weight, self.bias)
        return run(x, self.weight, self.bias, self._tile)


def pack(weight: Tensor, bias: Tensor | None) -> TritonLinear:
    """Keep the weight as it is; see `kernels.linear.pack`."""
    return TritonLinear(weight, bias)
