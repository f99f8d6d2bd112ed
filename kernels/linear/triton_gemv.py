"""The product of one token in Triton: the weight passes through registers, without tensor cores.

With a single token a matrix product is a sum along each row, and only the number of bytes in flight
matters. Tensor cores would need their operands in shared memory, tile by tile. Plain loads into
registers avoid that step, and small programs keep many loads in flight. A layer's products take as
long as a copy of their weights.

On an H200, the products of a step of an 8B model (15.0 GB) take 3.42 ms. The kernel for several
tokens takes 3.82 ms with one token; from two tokens on it is as fast or faster. Weights may also be
8-bit codes with a scale per row or per 128 columns of a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913, C901, SIM102 a kernel's parameters, and its variants, of which one is compiled

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs

# The loop over a row is unrolled, so longer rows would make long programs.
MAX_IN_FEATURES = 32768


class Cut(NamedTuple):
    """The sizes of a program's work.

    Attributes:
        rows: rows of the weight.
        columns: columns that are added up at a time.
        num_warps: warps of a program.
    """

    rows: int
    columns: int
    num_warps: int = 4


def cut_of(in_features: int, bits: int = 16) -> Cut:
    """Return the fastest or nearly fastest sizes, as measured with weights of 0.5B and 8B models.

    Args:
        in_features: columns of the weight.
        bits: bits of a number of the weight: 16, measured on an H200, or 8, measured on an H100.
    """
    if bits == 8:
        return Cut(2, 2048) if in_features > 1024 else Cut(4, 512)
    if in_features % 2048 == 0 and in_features <= 8192:
        return Cut(2, 2048)
    return Cut(2 if in_features > 8192 else 4, 1024)


class FurtherRows(NamedTuple):
    """Rows of one LoRA adapter that a launch multiplies in addition to the rows of the weight.

    Attributes:
        memory: `[num_places, num_ranks, width]`, the dtype of the weight. The entry of a rank
            begins with one row of `in_features` numbers for each part of the product.
        place: one int32, the adapter's index in `memory`; a negative number is read as 0.
        rank: one int32, number of ranks in use.
        num_parts: number of rows of each rank.
        made: `[num_parts, ranks]` float32, written: the products of the token and the adapter's
            rows. `ranks` is a multiple of 4, at least `num_ranks`. Sums of ranks that are not in
            use are also written and have no meaning.
    """

    memory: Tensor
    place: Tensor
    rank: Tensor
    num_parts: int
    made: Tensor


@triton.jit
def gemv_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    x_scale_ptr,
    bias_ptr,
    out_ptr,
    further_ptr,
    place_ptr,
    rank_ptr,
    made_ptr,
    out_features,
    place_stride,
    rank_stride,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_X_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one token by `ROWS` rows, of the weight or of the adapter."""
    # The programs of the adapter's rows come first.
    further: tl.constexpr = RANKS * PARTS // ROWS
    program = tl.program_id(0)
    row = (program - further) * ROWS + tl.arange(0, ROWS)
    # Rows past the end repeat the last one, so that loads need no mask.
    used = tl.maximum(tl.minimum(row, out_features - 1), 0).to(tl.int64)
    weight_row = weight_ptr + used[:, None] * IN_FEATURES
    start_next(PDL)
    wait_for_inputs(PDL)
    if RANKS > 0:
        if program < further:
            at = program * ROWS + tl.arange(0, ROWS)
            # Ranks that are not in use repeat the last one, and their results are not used.
            rank = tl.minimum(at % RANKS, tl.maximum(tl.load(rank_ptr) - 1, 0)).to(tl.int64)
            place = tl.maximum(tl.load(place_ptr), 0).to(tl.int64) * place_stride
            at_row = place + rank * rank_stride + at // RANKS * IN_FEATURES
            weight_row = further_ptr + at_row[:, None]
    if SCALES == "blocks":
        total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.static_range(0, IN_FEATURES, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        at = weight_row + column[None, :]
        if start + COLUMNS <= IN_FEATURES:
            weight = tl.load(at, eviction_policy="evict_first")
            x = tl.load(x_ptr + column)
        else:
            inside = column < IN_FEATURES
            weight = tl.load(at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + column, mask=inside, other=0.0)
        product = weight.to(tl.float32) * x.to(tl.float32)[None, :]
        if SCALES == "blocks":
            group = start // 128 + tl.arange(0, COLUMNS // 128)
            used_group = tl.minimum(group, (IN_FEATURES - 1) // 128)
            sums = tl.sum(tl.reshape(product, [ROWS, COLUMNS // 128, 128]), axis=2)
            sums *= tl.load(scale_ptr + used_group[None, :] * out_features + used[:, None])
            if HAS_X_SCALES:
                sums *= tl.load(x_scale_ptr + used_group)[None, :]
            total += tl.sum(sums, axis=1)
        else:
            acc += product
    result = total if SCALES == "blocks" else tl.sum(acc, axis=1)
    if RANKS > 0:
        if program < further:
            tl.store(made_ptr + program * ROWS + tl.arange(0, ROWS), result)
            return
    if SCALES == "rows":
        result *= tl.load(scale_ptr + used)
        if HAS_X_SCALES:
            result *= tl.load(x_scale_ptr)
    if HAS_BIAS:
        result += tl.load(bias_ptr + used).to(tl.float32)
    tl.store(out_ptr + row, result.to(out_ptr.dtype.element_ty), mask=row < out_features)


def gemv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cut: Cut | None = None,
    out: Tensor | None = None,
    scales: Tensor | None = None,
    x_scales: Tensor | None = None,
    further: FurtherRows | None = None,
) -> Tensor:
    """Return `x @ weight.T + bias` for one row.

    Args:
        x: `[1, in_features]`, contiguous, at most `MAX_IN_FEATURES` columns.
        weight: `[out_features, in_features]`, contiguous; the dtype of `x` unless it has scales.
        bias: `[out_features]`, or `None`.
        cut: sizes of a program's work, for tuning; `None` for the measured choice.
        out: `[1, out_features]`, contiguous, which is written and returned. `None` for a new
            tensor, which is bfloat16 if the weight has scales.
        scales: scales of the weight, `[out_features, num_groups]` float32, a view whose transpose
            is contiguous: one scale per row, or one per 128 columns of a row; `None` if it has no
            scales.
        x_scales: scales of `x` in the same form, `[1, num_groups]`, if `x` is rounded.
        further: an adapter's rows to multiply, too; only with a weight without scales.
    """
    out_features, in_features = weight.shape
    assert x.shape == (1, in_features)
    assert in_features <= MAX_IN_FEATURES
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert scales is not None or x.dtype == weight.dtype
    cut = cut or cut_of(in_features, 8 * weight.itemsize)
    if out is None:
        dtype = x.dtype if scales is None else torch.bfloat16
        out = torch.empty(1, out_features, dtype=dtype, device=x.device)
    ranks = parts = 0
    place_stride = rank_stride = 0
    others: tuple[Tensor, ...] = (weight, out, out, out)
    if further is not None:
        assert scales is None
        parts, ranks = further.num_parts, further.made.shape[-1]
        place_stride, rank_stride, _ = further.memory.stride()
        others = further.memory, further.place, further.rank, further.made
    kind = "none" if scales is None else "blocks" if scales.shape[1] > 1 else "rows"
    gemv_kernel[(triton.cdiv(out_features, cut.rows) + ranks * parts // cut.rows,)](
        x,
        weight,
        weight if scales is None else scales,
        weight if x_scales is None else x_scales,
        weight if bias is None else bias,
        out,
        *others,
        out_features,
        place_stride,
        rank_stride,
        RANKS=ranks,
        PARTS=parts,
        IN_FEATURES=in_features,
        SCALES=kind,
        HAS_X_SCALES=x_scales is not None,
        HAS_BIAS=bias is not None,
        ROWS=cut.rows,
        COLUMNS=max(128, min(cut.columns, triton.next_power_of_2(in_features))),
        num_warps=cut.num_warps,
        num_stages=1,
        **launch_options(x.device),
    )
    return out
