"""Linear layers for few tokens in Triton, more go to cuBLAS: the plain weight, nothing packed.

A product with up to 16 tokens reads the weight once and is as fast as memory is; what counts is
that every multiprocessor keeps enough loads in flight. `tile_of` holds which shapes are cut how,
from measurements on an H200 (`benchmarks/h200/linear.py`); None is a shape that cuBLAS does
better.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel takes what it touches

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from kernels.linear.reference import TorchLinear

MAX_TOKENS = 16


@dataclass(frozen=True)
class Tile:
    """Weight rows and columns of a block, warps a program, blocks in flight."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    feature = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, BLOCK_M)
    weight_row = weight_ptr + feature.to(tl.int64)[:, None] * in_features
    x_row = x_ptr + token[:, None] * in_features
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
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
    if HAS_BIAS:
        bias = tl.load(bias_ptr + feature, mask=feature < out_features, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    tl.store(
        out_ptr + token[None, :] * out_features + feature[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=(feature < out_features)[:, None] & (token < num_tokens)[None, :],
    )


def run(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """Return `x @ weight.T + bias` for at most 16 rows of float16 or bfloat16."""
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype
    out = x.new_empty(num_tokens, out_features)
    _linear_kernel[(triton.cdiv(out_features, tile.block_n),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_tokens,
        out_features,
        in_features,
        HAS_BIAS=bias is not None,
        EVEN_K=in_features % tile.block_k == 0,
        BLOCK_M=MAX_TOKENS,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    return out


def tile_of(out_features: int, in_features: int) -> Tile | None:
    """Return how a weight is cut, None for one that cuBLAS multiplies faster."""
    if out_features >= 8192:
        return Tile(64, 128, 4, 4)
    if out_features < 2048 and in_features > 2048:
        # Too few programs to keep memory busy; cuBLAS splits the sums.
        return None
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

    def __call__(self, x: Tensor) -> Tensor:
        if self._tile is None or not 0 < x.shape[0] <= MAX_TOKENS:
            return functional.linear(x, self.weight, self.bias)
        return run(x, self.weight, self.bias, self._tile)


def pack(weight: Tensor, bias: Tensor | None) -> TritonLinear:
    """Keep the weight as it is; see `kernels.linear.pack`."""
    return TritonLinear(weight, bias)
