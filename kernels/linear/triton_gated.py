"""The gate and up products of a feed-forward block with the activation, in one kernel for prompts.

With two kernels, the first writes `[num_tokens, 2 * width]` numbers that the second reads again:
159 MB per layer of a 0.5B model with 8192 tokens. In this kernel both products of a block stay in
registers. One program per multiprocessor processes block after block. TMA loads the operands and
pads them with zeros past an end. For TMA the weight is `[2, width, in_features]`, so one load
brings as many rows of gate as of up. One matrix instruction multiplies both (on Hopper
`wgmma.m64n256k16` for 128 features), so tokens are read once.

As with two kernels, each product is rounded to the dtype of the weight before the activation. Only
the order in which the products' terms are added differs.

Source: Triton's tutorial on persistent matrix products, with host-side descriptors and its order of
blocks (groups of tokens, so that weights stay in the L2 cache).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.activation import Activation
from kernels.activation.triton import activated
from kernels.triton_support.device import interpreted, multiprocessors

# TMA requires row strides and start addresses at multiples of 16 bytes.
_ALIGNED_BYTES = 16


@dataclass(frozen=True)
class Cut:
    """The sizes of a product's tile.

    Attributes:
        block_m, block_n, block_k: tokens, features and columns of a block; a program computes both
            gate and up for `block_n` features.
        num_warps: warps of a program.
        num_stages: blocks of columns in flight.
        group: number of blocks of tokens that are computed for one block of features before the
            next one.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    group: int = 8


# This tile is the fastest of fifteen, or within 1% of the fastest, at 2048, 4096 and 8192 tokens of
# the 8B and 0.5B shapes (`benchmarks.h200.products --tune` on an H200).
CUT = Cut()


# The kernel is not specialized on the number of tokens, because multiples of 16 would otherwise
# need a separate compilation.
@triton.jit(do_not_specialize=["num_tokens"])
def _gated_kernel(
    x,
    weight,
    out,
    bias_ptr,
    num_tokens,
    width,
    in_features,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    token_blocks = tl.cdiv(num_tokens, BLOCK_M)
    blocks = token_blocks * tl.cdiv(width, BLOCK_N)
    blocks_of_group = GROUP * tl.cdiv(width, BLOCK_N)
    chunks = tl.cdiv(in_features, BLOCK_K)
    # The loop is flattened, so that a block's first loads begin before the previous block is
    # stored.
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
        group = block // blocks_of_group
        within = block - group * blocks_of_group
        height = tl.minimum(token_blocks - group * GROUP, GROUP)
        m = (group * GROUP + within % height) * BLOCK_M
        n = (within // height) * BLOCK_N
        both = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for chunk in tl.range(chunks, num_stages=STAGES):
            k = chunk * BLOCK_K
            rows = tl.reshape(weight.load([0, n, k]), (2 * BLOCK_N, BLOCK_K))
            both = tl.dot(x.load([m, k]), tl.trans(rows), acc=both)
        # Each thread holds both numbers of a feature, so no data moves.
        gate, up = tl.split(tl.permute(tl.reshape(both, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        feature = n + tl.arange(0, BLOCK_N)
        if HAS_BIAS:
            inside = feature < width
            bias = tl.load(bias_ptr + feature, mask=inside, other=0.0)
            gate += bias.to(tl.float32)[None, :]
            bias = tl.load(bias_ptr + width + feature, mask=inside, other=0.0)
            up += bias.to(tl.float32)[None, :]
        gate = gate.to(out.dtype).to(tl.float32)
        up = up.to(out.dtype).to(tl.float32)
        result = (activated(gate, ACTIVATION) * up).to(out.dtype)
        out.store([m, n], result)


@cache
def _has_tma(device: torch.device) -> bool:
    if device.type != "cuda":
        return interpreted()
    # Later GPUs have TMA too, but were not tested, and some have less shared memory.
    return torch.cuda.get_device_capability(device)[0] == 9


def supports(weight: Tensor) -> bool:
    """Return whether `gated` supports the weight `[2 * width, in_features]`."""
    rows, columns = weight.shape
    halves = weight.dtype in (torch.bfloat16, torch.float16)
    whole = _ALIGNED_BYTES // 2
    return (
        halves
        and rows > 0
        and rows % (2 * whole) == 0
        and columns % whole == 0
        and weight.is_contiguous()
        and weight.data_ptr() % _ALIGNED_BYTES == 0
        and _has_tma(weight.device)
    )


def gated(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation, cut: Cut = CUT
) -> Tensor:
    """Return `activation(gate) * up`, where `gate` and `up` are halves of `x @ weight.T + bias`.

    The TMA descriptors are arguments of the launch, so a CUDA graph may hold it. The kernel does
    not start before the previous one has ended; compared with this much work, the wait costs
    little.

    Args:
        x: `[num_tokens, in_features]`, contiguous, the dtype of `weight`. It begins at a multiple
            of 16 bytes.
        weight: `[2 * width, in_features]`, gate first; `supports` must accept it.
        bias: `[2 * width]`, or `None`.
        activation: activation of the gate.
        cut: sizes of the tile, for tuning.

    Returns:
        A new `[num_tokens, width]` tensor, the dtype of `weight`.
    """
    num_tokens, in_features = x.shape
    width = weight.shape[0] // 2
    assert weight.shape[1] == in_features
    assert x.is_contiguous()
    assert x.dtype == weight.dtype
    out = x.new_empty(num_tokens, width)
    if num_tokens == 0:
        return out
    blocks = triton.cdiv(num_tokens, cut.block_m) * triton.cdiv(width, cut.block_n)
    _gated_kernel[(min(blocks, multiprocessors(x.device)),)](
        TensorDescriptor(x, list(x.shape), [in_features, 1], [cut.block_m, cut.block_k]),
        TensorDescriptor(
            weight,
            [2, width, in_features],
            [width * in_features, in_features, 1],
            [2, cut.block_n, cut.block_k],
        ),
        TensorDescriptor(out, list(out.shape), [width, 1], [cut.block_m, cut.block_n]),
        weight if bias is None else bias,
        num_tokens,
        width,
        in_features,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        BLOCK_M=cut.block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        STAGES=cut.num_stages,
        GROUP=cut.group,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    return out
