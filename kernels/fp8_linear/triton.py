"""Products in E4M3 and int8 on a GPU.

The kernel of the preceding norm or activation rounds the activations; otherwise a separate kernel
does. There are four kernels for the product. One token is multiplied without tensor cores
(`kernels.linear.triton_gemv`). For up to 64 tokens, our kernel reads the codes once and is limited
by memory. For more tokens, `torch._scaled_mm` is used if scales belong to rows, and another kernel
of ours if they belong to blocks.

If a scheme does not round activations, codes are converted to bfloat16 inside the product. If a
scheme rounds them, the activations of a single token are rounded too, because this is faster: on an
H200, the kernels of a layer of an 8B model, except attention, take 67.1 microseconds with rounding
and 69.6 without.

Microseconds of one product on an H100 in CUDA graphs, in bf16 and in codes with one scale per row:

    weight      1 token      64 tokens    2048 tokens
    28672x4096  75 and 42    84 and 53    669 and 353
    896x896     2.2 and 4.4  4.2 and 6.5  8.2 and 10.4

The times of 896x896 include the rounding of the activations; a matrix of this size is too small to
become faster. The tiles are the fastest of those that were tried on the H100.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913, C901 a kernel's parameters, and its variants, of which one is compiled

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.activation import Activation, act_and_mul
from kernels.activation.triton import activated
from kernels.fp8_linear import BLOCK_COLUMNS
from kernels.linear import PackedLinear
from kernels.linear.triton_gemv import MAX_IN_FEATURES, gemv
from kernels.rounding import Activations, RoundedTokens, Rounding
from kernels.rounding.triton import round_tokens
from kernels.triton_support.device import shared_memory
from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs
from kernels.triton_support.split_k import fits, leave_part, space, sum_parts

MAX_TOKENS = 64


@triton.jit(do_not_specialize=["num_tokens"])
def _few_kernel(
    x_ptr,
    x_scale_ptr,
    code_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    out_features,
    in_features,
    ROUNDED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    block = tl.program_id(0)
    part = tl.program_id(1)
    if ACTIVATION is not None:
        # As in `kernels.linear.triton`, a block has as many rows of gate as of up.
        place = tl.arange(0, BLOCK_N)
        half: tl.constexpr = BLOCK_N // 2
        width = out_features // 2
        feature = place // half * width + block * half + place % half
    else:
        feature = block * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = feature < out_features
    share = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = part * share
    end = tl.minimum(begin + share, in_features)
    code_row = code_ptr + feature.to(tl.int64)[:, None] * in_features
    start_next(PDL)
    wait_for_inputs(PDL)
    x_row = x_ptr + token.to(tl.int64)[:, None] * in_features
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        code_mask = here[:, None]
        x_mask = (token < num_tokens)[:, None]
        if not EVEN_K:
            code_mask = code_mask & (k < in_features)[None, :]
            x_mask = x_mask & (k < in_features)[None, :]
        weight = tl.load(
            code_row + k[None, :], mask=code_mask, other=0.0, eviction_policy="evict_first"
        )
        x = tl.load(x_row + k[None, :], mask=x_mask, other=0.0)
        if not ROUNDED:
            # This is exact: bfloat16 has more bits than E4M3 and int8, and a wider range.
            weight = weight.to(tl.float32).to(tl.bfloat16)
        # Blocks are added outside of the matrix instruction, whose own sums have few bits for 8-bit
        # operands.
        product = tl.dot(weight, tl.trans(x)).to(tl.float32)
        if BLOCKS:
            at = start // 128
            product *= tl.load(scale_ptr + at * out_features + feature, mask=here, other=0.0)[
                :, None
            ]
            if ROUNDED:
                product *= tl.load(
                    x_scale_ptr + at * num_tokens + token, mask=token < num_tokens, other=0.0
                )[None, :]
        acc += product
    if SPLIT_K > 1:
        place = tl.program_id(2) * tl.num_programs(0) + block
        before = leave_part(acc, partial_ptr, arrived_ptr, place, part, SPLIT_K, BLOCK_N, BLOCK_M)
        if before != SPLIT_K - 1:
            return
        acc = sum_parts(partial_ptr, arrived_ptr, place, SPLIT_K, BLOCK_N, BLOCK_M)
    if not BLOCKS:
        acc *= tl.load(scale_ptr + feature, mask=here, other=0.0)[:, None]
        if ROUNDED:
            acc *= tl.load(x_scale_ptr + token, mask=token < num_tokens, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + feature, mask=here, other=0.0).to(tl.float32)[:, None]
    if ACTIVATION is not None:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, half, BLOCK_M)), (1, 2, 0)))
        # Both are rounded like a product, as if the activation were a kernel of its own.
        gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
        up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
        column = block * half + tl.arange(0, half)
        tl.store(
            out_ptr + token.to(tl.int64)[None, :] * width + column[:, None],
            (activated(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty),
            mask=(column < width)[:, None] & (token < num_tokens)[None, :],
        )
        return
    tl.store(
        out_ptr + token.to(tl.int64)[None, :] * out_features + feature[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=here[:, None] & (token < num_tokens)[None, :],
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _block_kernel(
    x_code_ptr,
    x_scale_ptr,
    code_ptr,
    scale_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Consecutive programs use the same rows of the weight for different tokens, so the rows stay in
    # the cache.
    program = tl.program_id(0)
    token_blocks = tl.cdiv(num_tokens, BLOCK_M)
    row_blocks = tl.cdiv(out_features, BLOCK_N)
    of_group = GROUP_TOKENS * row_blocks
    first = program // of_group * GROUP_TOKENS
    size = tl.minimum(token_blocks - first, GROUP_TOKENS)
    token = (first + program % of_group % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    feature = program % of_group // size * BLOCK_N + tl.arange(0, BLOCK_N)
    start_next(PDL)
    wait_for_inputs(PDL)
    num_scales = tl.cdiv(in_features, 128)
    is_token, is_row = token < num_tokens, feature < out_features
    x_row = x_code_ptr + token.to(tl.int64)[:, None] * in_features
    code_row = code_ptr + feature.to(tl.int64)[None, :] * in_features
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if BLOCKS else tl.int32)
    for block in tl.range(0, num_scales, num_stages=STAGES):
        k = block * 128 + tl.arange(0, 128)
        x_mask, code_mask = is_token[:, None], is_row[None, :]
        if not EVEN_K:
            x_mask = x_mask & (k < in_features)[None, :]
            code_mask = code_mask & (k < in_features)[:, None]
        x = tl.load(x_row + k[None, :], mask=x_mask, other=0.0)
        codes = tl.load(code_row + k[:, None], mask=code_mask, other=0.0)
        if BLOCKS:
            x_scale = tl.load(x_scale_ptr + block * num_tokens + token, mask=is_token, other=0.0)
            scale = tl.load(scale_ptr + block * out_features + feature, mask=is_row, other=0.0)
            acc += tl.dot(x, codes) * (x_scale[:, None] * scale[None, :])
        else:
            acc = tl.dot(x, codes, acc=acc, out_dtype=tl.int32)
    if not BLOCKS:
        x_scale = tl.load(x_scale_ptr + token, mask=is_token, other=0.0)
        scale = tl.load(scale_ptr + feature, mask=is_row, other=0.0)
        acc = acc.to(tl.float32) * x_scale[:, None] * scale[None, :]
    tl.store(
        out_ptr + token.to(tl.int64)[:, None] * out_features + feature[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_token[:, None] & is_row[None, :],
    )


@dataclass(frozen=True)
class Tile:
    """The sizes of a product's tile.

    Attributes:
        rows, columns: rows of the weight, and columns of a step.
        split: number of programs that share the columns of a block.
        num_warps, num_stages: warps of a program, and steps in flight.
    """

    rows: int
    columns: int
    split: int
    num_warps: int
    num_stages: int


# The number of programs that fill the device. With 64 tokens on an H200, 96 programs without split
# columns are faster than 192 with split columns, and 128 with split columns are faster than 64
# without.
_ENOUGH = 96
# From this number of blocks on, several programs run on each multiprocessor of a large GPU.
_MANY_BLOCKS = 264


def tile_of(out_features: int, in_features: int, block_m: int, *, has_blocks: bool) -> Tile:
    """Return the tile for a product of up to `block_m` tokens.

    The tiles were chosen on an H200 (`benchmarks.h200.weight_forms --forms fp8 --tune`). There, a
    product with 64 tokens takes, in microseconds, with the earlier tiles (chosen on an H100) and
    with these: 28672x4096 41.6 and 35.4, 6144x4096 10.2 both, 4096x4096 9.3 and 8.2, 4096x14336
    26.5 and 20.2.
    """
    blocks, split = triton.cdiv(out_features, 64), 1
    columns, enough = (BLOCK_COLUMNS, 128) if has_blocks else (256, _ENOUGH)
    if not has_blocks and blocks >= _MANY_BLOCKS:
        # Programs on the same multiprocessor hide each other's starts and ends.
        return Tile(64, 128, 1, 4, 3)
    while (
        blocks * split < enough
        and 4 * split * columns <= in_features
        and fits(blocks, 64 * block_m, 2 * split)
    ):
        split *= 2
    deep = not has_blocks and (block_m < 64 or in_features > 8192)
    return Tile(64, columns, split, 4, 6 if deep else 4)


def multiply_few(
    x: Tensor,
    x_scales: Tensor | None,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    tile: Tile | None = None,
    gated: Activation | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias`; fastest for at most `MAX_TOKENS` tokens.

    Args:
        x: `[num_tokens, in_features]`, contiguous: bfloat16, which is not rounded, or E4M3 codes.
        x_scales: scales of the codes of `x`, `[num_tokens, num_groups]` float32, a view whose
            transpose is contiguous; `None` for bfloat16.
        codes: `[out_features, in_features]` E4M3, contiguous.
        scales: scales of `codes`, `[out_features, num_groups]` float32, a view whose transpose is
            contiguous: one scale per row, or one per 128 columns of a row.
        bias: `[out_features]`, or `None`.
        tile: `None` for the tile that suits the shape. A tile that splits columns supports few
            tokens only.
        gated: if given, the result is `gated(gate) * up`, where gate and up are halves of the
            product's columns. The tile must not split columns.

    Returns:
        `[num_tokens, out_features]` bfloat16, or half as wide if `gated` is given.
    """
    num_tokens, in_features = x.shape
    if gated is None and num_tokens == 1 and in_features <= MAX_IN_FEATURES and tile is None:
        return gemv(x, codes, bias, scales=scales, x_scales=x_scales)
    out_features = len(codes)
    width = out_features if gated is None else out_features // 2
    out = torch.empty(num_tokens, width, dtype=torch.bfloat16, device=x.device)
    block_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    has_blocks = in_features > BLOCK_COLUMNS and scales.shape[1] > 1
    if tile is None:
        tile = tile_of(out_features, in_features, block_m, has_blocks=has_blocks)
        if num_tokens > MAX_TOKENS or gated is not None:
            tile = replace(tile, split=1)
    blocks, token_blocks = triton.cdiv(out_features, tile.rows), triton.cdiv(num_tokens, block_m)
    assert gated is None or tile.split == 1
    partials, arrived = out, out
    if tile.split > 1:
        partials, arrived = space(x.device, blocks * token_blocks, tile.rows * block_m, tile.split)
    _few_kernel[(blocks, tile.split, token_blocks)](
        x,
        scales if x_scales is None else x_scales,
        codes,
        scales,
        out if bias is None else bias,
        out,
        partials,
        arrived,
        num_tokens,
        out_features,
        in_features,
        ROUNDED=x_scales is not None,
        HAS_BIAS=bias is not None,
        BLOCKS=has_blocks,
        EVEN_K=in_features % tile.columns == 0,
        BLOCK_M=block_m,
        BLOCK_N=tile.rows,
        BLOCK_K=tile.columns,
        SPLIT_K=tile.split,
        STAGES=shared_memory(x.device).stages(
            tile.num_stages, (tile.rows + block_m * x.itemsize) * tile.columns
        ),
        ACTIVATION=gated,
        num_warps=tile.num_warps,
        **launch_options(x.device),
    )
    return out


def multiply_blocks(x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiply quantized rows with a quantized weight: E4M3 or int8 codes, both with scales.

    In E4M3, 128 consecutive numbers of a row have one scale; in int8, the whole row has one.

    Args:
        x: `[num_tokens, in_features]` E4M3 or int8, contiguous.
        x_scales: `[num_tokens, ceil(in_features / 128)]` float32, transposed in memory;
            `[num_tokens, 1]` for int8.
        codes: `[out_features, in_features]`, the dtype of `x`, contiguous.
        scales: `[out_features, ceil(in_features / 128)]` float32, transposed in memory;
            `[out_features, 1]` for int8.

    Returns:
        `[num_tokens, out_features]` bfloat16.
    """
    num_tokens, in_features = x.shape
    out_features = len(codes)
    out = torch.empty(num_tokens, out_features, dtype=torch.bfloat16, device=x.device)
    has_blocks = x.dtype is not torch.int8
    block_m, block_n, warps = (128, 64, 4) if has_blocks else (128, 128, 8)
    grid = (triton.cdiv(num_tokens, block_m) * triton.cdiv(out_features, block_n),)
    _block_kernel[grid](
        x,
        x_scales,
        codes,
        scales,
        out,
        num_tokens,
        out_features,
        in_features,
        BLOCKS=has_blocks,
        EVEN_K=in_features % BLOCK_COLUMNS == 0,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        GROUP_TOKENS=8,
        STAGES=shared_memory(x.device).stages(4, (block_m + block_n) * BLOCK_COLUMNS),
        num_warps=warps,
        **launch_options(x.device),
    )
    return out


class Fp8Linear(PackedLinear):
    """A linear layer on a GPU whose weight is quantized to 8 bits: codes (E4M3 or int8) and scales.

    New codes are copied into the same memory, because CUDA graphs hold its addresses.
    """

    implementation = "triton"

    def __init__(
        self, codes: Tensor, scales: Tensor, rounding: Rounding | None, bias: Tensor | None
    ) -> None:
        """Keep the tensors.

        Args:
            codes: `[out_features, in_features]` E4M3 or int8, contiguous.
            scales: `[out_features, num_groups]` float32: one scale per row, or one per 128 columns
                of a row.
            rounding: how activations are rounded; `None` if they are not rounded.
            bias: `[out_features]` bfloat16, or `None`.
        """
        super().__init__(codes.shape[1], codes.shape[0])
        self.codes, self.rounding, self.bias = codes, rounding, bias
        self.scales = scales.t().contiguous().t()

    @property
    def size_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.codes.nbytes + self.scales.nbytes + bias

    def __call__(self, x: Activations) -> Tensor:
        rounded = x
        if isinstance(x, Tensor):
            if self.rounding is None:
                return multiply_few(x, None, self.codes, self.scales, self.bias)
            rounded = round_tokens(x, self.rounding)
        assert isinstance(rounded, RoundedTokens)
        assert self.rounding is not None
        codes, scales = rounded.codes, rounded.scales
        if len(codes) <= MAX_TOKENS:
            return multiply_few(codes, scales, self.codes, self.scales, self.bias)
        if self.rounding.group or codes.dtype is torch.int8:
            out = multiply_blocks(codes, scales, self.codes, self.scales)
        else:
            out = torch._scaled_mm(
                codes,
                self.codes.t(),
                scales,
                self.scales.t(),
                out_dtype=torch.bfloat16,
                # With this option the product sums with fewer bits and takes 10% less time. On an
                # H100 its relative error is 2.1e-3 to 3.3e-3 instead of 1.7e-3; the error of
                # rounding to E4M3 is 2.6e-2.
                use_fast_accum=True,
            )
        return out if self.bias is None else out.add_(self.bias)

    def gates_in_one_kernel(self, num_tokens: int) -> bool:
        return 2 <= num_tokens <= MAX_TOKENS

    def gated(self, x: Activations, activation: Activation) -> Tensor:
        if not self.gates_in_one_kernel(len(x)):
            return act_and_mul(self(x), activation)
        scales = None
        if self.rounding is not None:
            rounded = x if isinstance(x, RoundedTokens) else round_tokens(x, self.rounding)
            x, scales = rounded.codes, rounded.scales
        assert isinstance(x, Tensor)
        return multiply_few(x, scales, self.codes, self.scales, self.bias, gated=activation)

    def unpack(self) -> Tensor:
        """Return the float32 `[out_features, in_features]` numbers that the codes stand for."""
        spread = self.scales
        if spread.shape[1] > 1:
            spread = spread.repeat_interleave(BLOCK_COLUMNS, 1)[:, : self.in_features]
        return self.codes.float() * spread

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:  # noqa: ARG002
        """Raise an error: only quantized weights can replace quantized weights.

        Raises:
            ValueError: always; quantized weights are replaced by `replace`.
        """
        raise ValueError("floats cannot replace a matrix in fp8; use `replace`")

    def replace(self, other: "Fp8Linear") -> bool:
        """Copy the tensors of `other` into our memory; return false if shapes or dtypes differ."""
        mine, theirs = self._tensors(), other._tensors()
        if [(t.shape, t.dtype) for t in mine] != [(t.shape, t.dtype) for t in theirs]:
            return False
        if (self.rounding is None) != (other.rounding is None):
            return False
        for to, tensor in zip(mine, theirs, strict=True):
            to.copy_(tensor)
        return True

    def _tensors(self) -> list[Tensor]:
        static = None if self.rounding is None else self.rounding.scale
        found = (self.codes, self.scales, self.bias, static)
        return [tensor for tensor in found if tensor is not None]
