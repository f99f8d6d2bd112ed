"""Products in E4M3 on a GPU.

Up to 64 tokens the codes are widened inside the product, which reads the weight once and is limited
by memory: activations need no rounding, and no kernel that rounds them. More tokens are rounded by
a kernel ahead; `torch._scaled_mm` multiplies where a scale is that of a row, a kernel of ours where
it is that of a block.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.fp8_linear import BLOCK_COLUMNS, CODES, Rounding, Scales
from kernels.linear import PackedLinear
from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs
from kernels.triton_support.scratch import StreamScratch

MAX_TOKENS = 64
_MAX_PARTIALS = 1024 * 1024
_MAX_BLOCKS = 8192
_FULL_DEVICE = 128


@triton.jit(do_not_specialize=["num_tokens"])
def _few_kernel(
    x_ptr,
    code_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    out_features,
    in_features,
    HAS_BIAS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
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
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = feature < out_features
    share = tl.cdiv(tl.cdiv(in_features, BLOCK_K), SPLIT_K) * BLOCK_K
    begin = part * share
    end = tl.minimum(begin + share, in_features)
    code_row = code_ptr + feature.to(tl.int64)[:, None] * in_features
    start_next(PDL)
    wait_for_inputs(PDL)
    x_row = x_ptr + token.to(tl.int64)[:, None] * in_features
    num_scales = tl.cdiv(in_features, 128) if BLOCKS else 1
    scale_row = scale_ptr + feature // SCALE_ROWS * num_scales
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK_K)
        inside = (k < in_features)[None, :]
        codes = tl.load(code_row + k[None, :], mask=here[:, None] & inside, other=0.0)
        x = tl.load(x_row + k[None, :], mask=(token < num_tokens)[:, None] & inside, other=0.0)
        # Exact: bfloat16 has more bits and a wider range than E4M3.
        weight = codes.to(tl.bfloat16)
        if BLOCKS:
            scale = tl.load(scale_row + start // 128, mask=here, other=0.0)
            acc += tl.dot(weight, tl.trans(x)) * scale[:, None]
        else:
            acc = tl.dot(weight, tl.trans(x), acc=acc)
    if SPLIT_K > 1:
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        place = tl.program_id(2) * tl.num_programs(0) + block
        first_ptr = partial_ptr + place * (SPLIT_K * BLOCK_N * BLOCK_M)
        tl.store(first_ptr + part * (BLOCK_N * BLOCK_M) + inner, acc)
        # All threads' parts are written before the count is incremented.
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + place, 1, sem="acq_rel", scope="gpu")
        if before != SPLIT_K - 1:
            return
        tl.store(arrived_ptr + place, 0)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for other in tl.static_range(SPLIT_K):
            # Bypasses the L1 cache: other multiprocessors wrote these.
            acc += tl.load(first_ptr + other * (BLOCK_N * BLOCK_M) + inner, cache_modifier=".cg")
    if not BLOCKS:
        acc *= tl.load(scale_row, mask=here, other=0.0)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + feature, mask=here, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out_ptr + token.to(tl.int64)[None, :] * out_features + feature[:, None],
        acc.to(out_ptr.dtype.element_ty),
        mask=here[:, None] & (token < num_tokens)[None, :],
    )


@triton.jit
def _round_kernel(
    x_ptr,
    static_ptr,
    code_ptr,
    scale_ptr,
    in_features,
    num_groups,
    GROUP: tl.constexpr,
    SPACE: tl.constexpr,
    STATIC: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    start_next(PDL)
    wait_for_inputs(PDL)
    width = GROUP if GROUP else in_features
    column = group * width + tl.arange(0, SPACE)
    inside = (column < in_features) & (tl.arange(0, SPACE) < width)
    x = tl.load(x_ptr + token * in_features + column, mask=inside, other=0.0).to(tl.float32)
    if STATIC:
        scale = tl.load(static_ptr)
    else:
        scale = tl.maximum(tl.max(tl.abs(x)) / 448.0, 1e-12)
    rounded = tl.minimum(tl.maximum(x / scale, -448.0), 448.0)
    tl.store(
        code_ptr + token * in_features + column,
        rounded.to(code_ptr.dtype.element_ty),
        mask=inside,
    )
    tl.store(scale_ptr + token * num_groups + group, scale)


@triton.jit(do_not_specialize=["num_tokens"])
def _block_kernel(
    x_ptr,
    x_scale_ptr,
    code_ptr,
    scale_ptr,
    out_ptr,
    num_tokens,
    out_features,
    in_features,
    SCALE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    # Consecutive programs take blocks of tokens on the same rows, which stay in the cache.
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
    x_row = x_ptr + token.to(tl.int64)[:, None] * in_features
    code_row = code_ptr + feature.to(tl.int64)[None, :] * in_features
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, num_scales, num_stages=STAGES):
        k = block * 128 + tl.arange(0, 128)
        inside = k < in_features
        x = tl.load(x_row + k[None, :], mask=is_token[:, None] & inside[None, :], other=0.0)
        codes = tl.load(code_row + k[:, None], mask=inside[:, None] & is_row[None, :], other=0.0)
        x_scale = tl.load(
            x_scale_ptr + token.to(tl.int64) * num_scales + block, mask=is_token, other=0.0
        )
        scale = tl.load(
            scale_ptr + feature // SCALE_ROWS * num_scales + block, mask=is_row, other=0.0
        )
        acc += tl.dot(x, codes) * (x_scale[:, None] * scale[None, :])
    tl.store(
        out_ptr + token.to(tl.int64)[:, None] * out_features + feature[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=is_token[:, None] & is_row[None, :],
    )


def _shared_space(device: torch.device) -> tuple[Tensor, ...]:
    """Return space for parts and the counts of finished parts, 0 between products."""
    return (
        torch.empty(_MAX_PARTIALS, dtype=torch.float32, device=device),
        torch.zeros(_MAX_BLOCKS, dtype=torch.int32, device=device),
    )


_SHARED_SPACE = StreamScratch(_shared_space)


def multiply_few(
    x: Tensor, codes: Tensor, scales: Scales, bias: Tensor | None, *, split_k: int | None = None
) -> Tensor:
    """Return `x @ weight.T + bias` with the codes widened, activations not rounded.

    Args:
        x: `[num_tokens, in_features]` bfloat16, contiguous; best for at most `MAX_TOKENS`.
        codes: `[out_features, in_features]` E4M3, contiguous.
        scales: of the codes.
        bias: `[out_features]`, or None.
        split_k: programs that share the columns of a block of rows; `None` for what fills a GPU.
    """
    num_tokens, in_features = x.shape
    out_features = len(codes)
    out = x.new_empty(num_tokens, out_features)
    block_m = 16 if num_tokens <= 16 else 32 if num_tokens <= 32 else 64
    has_blocks = scales.values.shape[1] > 1 or scales.rows > 1
    block_n = 64 if out_features >= 8192 or block_m > 16 else 32 if out_features > 2048 else 16
    block_k = BLOCK_COLUMNS if has_blocks or block_m > 16 else 256
    blocks, token_blocks = triton.cdiv(out_features, block_n), triton.cdiv(num_tokens, block_m)
    if split_k is None:
        split_k = 1
        most = in_features // (4 * block_k)
        while blocks * token_blocks * split_k < _FULL_DEVICE and 2 * split_k <= min(most, 8):
            split_k *= 2
    partials, arrived = out, out
    if split_k > 1:
        partials, arrived = _SHARED_SPACE.get(x.device)
        assert blocks * block_n * token_blocks * block_m * split_k <= _MAX_PARTIALS
    _few_kernel[(blocks, split_k, token_blocks)](
        x,
        codes,
        scales.values,
        out if bias is None else bias,
        out,
        partials,
        arrived,
        num_tokens,
        out_features,
        in_features,
        HAS_BIAS=bias is not None,
        BLOCKS=has_blocks,
        SCALE_ROWS=scales.rows,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPLIT_K=split_k,
        STAGES=4,
        num_warps=4,
        **launch_options(x.device),
    )
    return out


def round_tokens(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """See `kernels.fp8_linear.round_to_codes`; `x` is contiguous."""
    num_tokens, in_features = x.shape
    groups = triton.cdiv(in_features, rounding.group) if rounding.group else 1
    codes = torch.empty(x.shape, dtype=CODES, device=x.device)
    scales = torch.empty(num_tokens, groups, dtype=torch.float32, device=x.device)
    _round_kernel[(num_tokens, groups)](
        x,
        scales if rounding.scale is None else rounding.scale,
        codes,
        scales,
        in_features,
        groups,
        GROUP=rounding.group,
        SPACE=triton.next_power_of_2(rounding.group or in_features),
        STATIC=rounding.scale is not None,
        num_warps=1 if rounding.group else 8,
        **launch_options(x.device),
    )
    return codes, scales


def multiply_blocks(x: Tensor, x_scales: Tensor, codes: Tensor, scales: Scales) -> Tensor:
    """Return `x @ weight.T` of codes, both with a scale for every 128 columns.

    Args:
        x: `[num_tokens, in_features]` E4M3, contiguous.
        x_scales: `[num_tokens, ceil(in_features / 128)]` float32.
        codes: `[out_features, in_features]` E4M3, contiguous.
        scales: of the codes.

    Returns:
        `[num_tokens, out_features]` bfloat16.
    """
    num_tokens, in_features = x.shape
    out_features = len(codes)
    out = torch.empty(num_tokens, out_features, dtype=torch.bfloat16, device=x.device)
    block_m = 64 if num_tokens <= 256 else 128
    grid = (triton.cdiv(num_tokens, block_m) * triton.cdiv(out_features, 128),)
    _block_kernel[grid](
        x,
        x_scales,
        codes,
        scales.values,
        out,
        num_tokens,
        out_features,
        in_features,
        SCALE_ROWS=scales.rows,
        BLOCK_M=block_m,
        BLOCK_N=128,
        GROUP_TOKENS=8,
        STAGES=3,
        num_warps=4 if block_m == 64 else 8,
        **launch_options(x.device),
    )
    return out


class Fp8Linear(PackedLinear):
    """Codes and scales on a GPU, replaced in place: CUDA graphs hold their addresses."""

    implementation = "triton"

    def __init__(
        self, codes: Tensor, scales: Scales, rounding: Rounding | None, bias: Tensor | None
    ) -> None:
        """Keep the tensors.

        Args:
            codes: `[out_features, in_features]` E4M3, contiguous.
            scales: of the codes.
            rounding: of activations where there are many tokens; `None` for none.
            bias: `[out_features]` bfloat16, or None.
        """
        super().__init__(codes.shape[1], codes.shape[0])
        self.codes, self.scales, self.rounding, self.bias = codes, scales, rounding, bias
        # Rows are multiplied by one transposed view; its scales lie beside each other.
        self._row_scales = scales.values.view(1, -1) if self._has_row_scales else None

    @property
    def _has_row_scales(self) -> bool:
        return self.scales.rows == 1 and self.scales.values.shape[1] == 1

    @property
    def size_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self.codes.nbytes + self.scales.values.nbytes + bias

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) <= MAX_TOKENS or self.rounding is None:
            return multiply_few(x, self.codes, self.scales, self.bias)
        codes, scales = round_tokens(x, self.rounding)
        if self._row_scales is None:
            out = multiply_blocks(codes, scales, self.codes, self.scales)
        else:
            out = torch._scaled_mm(
                codes, self.codes.t(), scales, self._row_scales, out_dtype=torch.bfloat16
            )
        return out if self.bias is None else out.add_(self.bias)

    def unpack(self) -> Tensor:
        """Return the float32 `[out_features, in_features]` numbers that the codes stand for."""
        spread = self.scales.values.repeat_interleave(self.scales.rows, 0)[: self.out_features]
        if spread.shape[1] > 1 or self.scales.rows > 1:
            spread = spread.repeat_interleave(BLOCK_COLUMNS, 1)[:, : self.in_features]
        return self.codes.float() * spread

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:  # noqa: ARG002
        """Refuse: codes are replaced by codes.

        Raises:
            ValueError: always; see `replace`.
        """
        raise ValueError("a matrix in fp8 takes codes and scales")

    def replace(self, other: "Fp8Linear") -> bool:
        """Take another product's numbers into our memory; false where it is of another form."""
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
        found = (self.codes, self.scales.values, self.bias, static)
        return [tensor for tensor in found if tensor is not None]
