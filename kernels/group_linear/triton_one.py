"""One token's product with 4-bit codes in Triton: codes stream through registers, no tensor cores.

With a single token only bytes in flight and instructions a code matter. A program multiplies some
rows by all columns, so nothing is shared among programs. Codes lie as `triton_codes` describes
them. Two words of 16 bits have eight codes; each becomes a float32 by one logical operation, which
sets the exponent that gives the code's lowest bit the value 1, and one exact subtraction. The
tokens' numbers are widened once for `GROUPS` rows of a thread.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913, PLR0915, C901 a kernel's parameters, and its variants

import struct
from typing import NamedTuple

import triton
import triton.language as tl

from kernels.group_linear.triton_codes import PLANE, STEP, code_of, factor, four_planes
from kernels.triton_support.launch import start_next, wait_for_inputs

# Of a warp: four threads have a row's words of a block of columns.
ROWS = tl.constexpr(8)


class Cut(NamedTuple):
    """Rows of a thread, warps of a program, each with columns of its own, and steps unrolled."""

    groups: int
    num_warps: int
    unroll: int = 1


def _float32(middle: int) -> str:
    """PTX from two words, $8, to the floats of their four planes, less `middle`."""
    # The fields of each plane, of the first word and of the second.
    code = "{ .reg .b32 l, h; shl.b32 l, $8, 12; shr.u32 h, $8, 12;\n"
    places = [("l", 12), ("$8", 16), ("l", 16), ("h", 8), ("$8", 8), ("h", 12), ("$8", 12)]
    for out, (source, shift) in enumerate([*places, ("h", 16)]):
        exponent = 23 - shift
        mask, magic = 15 << shift, (127 + exponent) << 23
        bits = _bits_of(-(2.0**exponent) - middle)
        code += f"lop3.b32 ${out}, {source}, {mask:#x}, {magic:#x}, 0xEA;\n"
        code += f"add.f32 ${out}, ${out}, 0f{bits:08X};\n"
    return code + "}"


def _bits_of(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


_SIGNED = tl.constexpr(_float32(8))
_UNSIGNED = tl.constexpr(_float32(0))


@triton.jit
def numbers_of(
    words, KIND: tl.constexpr, FORM: tl.constexpr, MIDDLE: tl.constexpr, ASM: tl.constexpr
):
    """Return the float32 numbers of four planes, without scales and without codes of zero."""
    if FORM != "int4":
        p0, p1, p2, p3 = four_planes(words, 0, KIND, FORM, ASM)
        p0, p1, p2, p3 = p0.to(tl.float32), p1.to(tl.float32), p2.to(tl.float32), p3.to(tl.float32)
    elif not ASM:
        p0 = (code_of(words, 0, 4) - MIDDLE).to(tl.float32)
        p1 = (code_of(words, 1, 4) - MIDDLE).to(tl.float32)
        p2 = (code_of(words, 2, 4) - MIDDLE).to(tl.float32)
        p3 = (code_of(words, 3, 4) - MIDDLE).to(tl.float32)
    elif MIDDLE == 8:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _SIGNED, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        p0, p1, p2, p3 = tl.inline_asm_elementwise(
            _UNSIGNED, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    return p0, p1, p2, p3


@triton.jit
def one_kernel(
    x_ptr,
    plane_ptr,
    word_ptr,
    row_scale_ptr,
    row_zero_ptr,
    bias_ptr,
    out_ptr,
    out_features,
    IN_FEATURES: tl.constexpr,
    EVEN_K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one token by `GROUPS * ROWS` rows; parameters as of `few_kernel`."""
    SMALL: tl.constexpr = GROUP > 0 and GROUP < STEP
    MIDDLE: tl.constexpr = 0 if HAS_ZERO or FORM != "int4" else 8
    NUM_STEPS: tl.constexpr = (IN_FEATURES + STEP - 1) // STEP
    row = tl.program_id(0) * GROUPS * ROWS
    row += tl.arange(0, GROUPS)[:, None, None] * ROWS + tl.arange(0, ROWS)[None, None, :]
    # Rows past the end repeat the last one: loads need no mask.
    used = tl.minimum(row, out_features - 1)
    within = tl.arange(0, PLANE)[None, None, None, :]
    code_row = plane_ptr + used[:, :, :, None] * PLANE + within
    stride = out_features.to(tl.int64) * PLANE
    kind = x_ptr.dtype.element_ty
    start_next(PDL)
    wait_for_inputs(PDL)
    if GROUP == 0 and HAS_ZERO:
        zeros = tl.load(row_zero_ptr + used).to(tl.float32)
    acc = tl.zeros([GROUPS, WARPS, ROWS, PLANE], tl.float32)
    for start in tl.range(0, NUM_STEPS, WARPS, loop_unroll_factor=UNROLL):
        step = start + tl.arange(0, WARPS)[None, :, None]
        # Steps past the end have no columns.
        read = tl.minimum(step, NUM_STEPS - 1)
        words = tl.load(code_row + read[:, :, :, None] * stride, eviction_policy="evict_first")
        if GROUP > 0:
            at = read if SMALL else read // (GROUP // STEP)
            word_at = word_ptr + at * (WORDS * out_features) + used
            word = tl.load(word_at)
            second = word
            if SMALL and tl.uint8 != SCALES and GROUP == 32:
                second = tl.load(word_at + out_features)
            if SMALL and HAS_ZERO:
                packed = tl.load(word_at + (WORDS - 1) * out_features)
            elif HAS_ZERO:
                zeros = ((word >> 16) & 255).to(tl.float32)
        numbers = numbers_of(words, kind, FORM, MIDDLE, ASM)
        product = tl.zeros([GROUPS, WARPS, ROWS, PLANE], tl.float32)
        for plane in tl.static_range(4):
            column = step[:, :, :, None] * STEP + plane * PLANE + within
            column += tl.zeros([1, WARPS, ROWS, PLANE], tl.int32)
            if EVEN_K:
                x = tl.load(x_ptr + column).to(tl.float32)
            else:
                x = tl.load(x_ptr + column, mask=column < IN_FEATURES, other=0.0).to(tl.float32)
            if SMALL:
                if HAS_ZERO:
                    zeros = ((packed >> (8 * (plane * PLANE // GROUP))) & 255).to(tl.float32)
                if tl.uint8 == SCALES or plane * PLANE // GROUP < 2:
                    scale = factor(word, plane * PLANE // GROUP, SCALES)
                else:
                    scale = factor(second, plane * PLANE // GROUP, SCALES)
                number = numbers[plane]
                if HAS_ZERO:
                    number -= zeros[:, :, :, None]
                acc += number * x * scale[:, :, :, None]
            elif HAS_ZERO:
                product += (numbers[plane] - zeros[:, :, :, None]) * x
            else:
                product += numbers[plane] * x
        if GROUP == 0:
            acc += product
        elif not SMALL:
            acc += product * factor(word, 0, SCALES)[:, :, :, None]
    result = tl.sum(tl.sum(acc, axis=3), axis=1)
    feature = tl.program_id(0) * GROUPS * ROWS
    feature += tl.arange(0, GROUPS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    here = feature < out_features
    if GROUP == 0:
        result *= tl.load(row_scale_ptr + feature, mask=here, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias_ptr + feature, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + feature, result.to(kind), mask=here)
