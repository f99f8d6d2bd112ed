"""The kernels of `kernels.group_linear.triton`: products that convert quantized weights (codes).

Codes become floats in registers, so the float matrix is never in memory.

A matrix is stored in blocks of columns, all rows of a block one after the other: `[blocks, rows,
32]` 16-bit words. A word holds the codes of columns that are 32 apart, four 4-bit codes or two
8-bit codes: bit field `p` of word `j` is the code of column `32 * p + j` of its block. A block
therefore has planes of 32 columns. Each plane is an operand of a product without further moves: no
code goes to another thread.

Scales and zero points are stored in 32-bit words, because smaller loads cannot be in flight ahead
of time. There are `WORDS` words for each row and `STEP` columns, or for each row and group if a
group is larger:

- Groups of at least `STEP` columns: a word has a 16-bit scale, and the zero point in the bits
  above.
- Groups of 64 columns: a word has two scales.
- Groups of 32 columns: two words have four scales. The exponents of `mxfp4` fill one word.
- For these small groups, a last word has the zero points.

The conversion takes about one instruction per code. For two codes at once, bits are set next to
each code, which makes the code a 16-bit float (128 + code in bfloat16, 1024 + code in float16). The
zero point is made into a float in the same way, and is subtracted, which is exact. The bits of a
4-bit float are moved to their places in a 16-bit float, and the result is multiplied by a power of
two.

Source of the conversion: Kim et al., "Who Says Elephants Can't Run" (2022), also in Marlin.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913, C901 a kernel's parameters, and its variants, of which one is compiled

import triton
import triton.language as tl

from kernels.triton_support.launch import start_next, wait_for_inputs
from kernels.triton_support.split_k import leave_part, sum_parts

# Columns that a program multiplies at a time. Rows are padded with codes to a multiple of this
# number.
STEP = tl.constexpr(128)
PLANE = tl.constexpr(32)

# By dtype, as two packed floats each: the float into whose low bits a code fits; -1; the power of
# two by which a moved E2M1 is too small; the mask of its exponent and mantissa; and how far they
# are shifted left.
_BF16 = ("bf16x2", "0x43004300", "0xBF80BF80", "0x7E807E80", "0x01C001C0", 6)
_FP16 = ("f16x2", "0x64006400", "0xBC00BC00", "0x74007400", "0x0E000E00", 9)


def _int4(kind: str, magic: str, minus: str, *_: object) -> str:
    """Return PTX code that converts two words, $4, with two zero points, $5, to numbers.

    The result has the numbers of four planes.
    """
    code = f"{{ .reg .b32 t, m; mov.b32 m, {minus};\n"
    for plane in range(4):
        code += f"shr.u32 t, $4, {4 * plane};\n" if plane else "mov.b32 t, $4;\n"
        # With the constant 0xEA, lop3 computes (a & b) | c.
        code += f"lop3.b32 t, t, 0x000F000F, {magic}, 0xEA;\n"
        code += f"fma.rn.{kind} ${plane}, $5, m, t;\n"
    return code + "}"


def _e2m1(kind: str, _magic: str, _minus: str, power: str, mask: str, left: int) -> str:
    """Return PTX code that converts two words, $4, to numbers of four planes."""
    code = f"{{ .reg .b32 a, b, p, z; mov.b32 p, {power}; mov.b32 z, 0x80008000;\n"
    for plane in range(4):
        up = left - 4 * plane
        code += f"shl.b32 a, $4, {12 - 4 * plane}; and.b32 a, a, 0x80008000;\n"
        code += f"shl.b32 b, $4, {up};\n" if up >= 0 else f"shr.u32 b, $4, {-up};\n"
        code += f"lop3.b32 b, b, {mask}, a, 0xEA;\n"
        code += f"fma.rn.{kind} ${plane}, b, p, z;\n"
    return code + "}"


_INT4_BF16 = tl.constexpr(_int4(*_BF16))
_INT4_FP16 = tl.constexpr(_int4(*_FP16))
_E2M1_BF16 = tl.constexpr(_e2m1(*_BF16))
_E2M1_FP16 = tl.constexpr(_e2m1(*_FP16))


@triton.jit
def code_of(words, plane: tl.constexpr, BITS: tl.constexpr):
    """Return the codes of one plane, int32."""
    return (words.to(tl.int32) >> (plane * BITS)) & ((1 << BITS) - 1)


@triton.jit
def e2m1(code):
    """Return the float32 numbers of 4-bit floats."""
    size = code & 7
    power = tl.maximum(size >> 1, 1) - 1
    twice = tl.where(size < 2, size, (2 + (size & 1)) << power)
    return tl.where(code >= 8, -0.5, 0.5) * twice.to(tl.float32)


@triton.jit
def biased(zero, KIND: tl.constexpr):
    """Return zero points plus the offset of the codes, `[rows, 1]` of dtype `KIND`.

    `four_planes` reads a code as a number that is larger by 128 (bfloat16) or 1024 (float16), and
    subtracts this result from it.
    """
    magic: tl.constexpr = 128.0 if tl.bfloat16 == KIND else 1024.0
    return (zero.to(tl.float32) + magic).to(KIND)[:, None]


@triton.jit
def four_planes(words, zero, KIND: tl.constexpr, FORM: tl.constexpr, ASM: tl.constexpr):
    """Return the numbers of 4-bit codes for each of four planes, without their scales.

    Args:
        words: `[rows, 32]` int16.
        zero: the result of `biased`; used for `int4` only.
        KIND: dtype of the numbers, bfloat16 or float16.
        FORM: `int4` or `mxfp4`.
        ASM: whether to use PTX.
    """
    if ASM and FORM == "int4":
        zero = tl.broadcast_to(zero, words.shape)
        if tl.bfloat16 == KIND:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                _INT4_BF16, "=&r,=&r,=&r,=&r,r,r", [words, zero],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                _INT4_FP16, "=&r,=&r,=&r,=&r,r,r", [words, zero],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    elif ASM:
        if tl.bfloat16 == KIND:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                _E2M1_BF16, "=&r,=&r,=&r,=&r,r", [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            p0, p1, p2, p3 = tl.inline_asm_elementwise(
                _E2M1_FP16, "=&r,=&r,=&r,=&r,r", [words],
                dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    elif FORM == "int4":
        # The sum is computed in 16-bit floats, as in the PTX code.
        magic: tl.constexpr = 128.0 if tl.bfloat16 == KIND else 1024.0
        zero = zero.to(tl.float32) - magic
        p0 = (code_of(words, 0, 4).to(tl.float32) - zero).to(KIND)
        p1 = (code_of(words, 1, 4).to(tl.float32) - zero).to(KIND)
        p2 = (code_of(words, 2, 4).to(tl.float32) - zero).to(KIND)
        p3 = (code_of(words, 3, 4).to(tl.float32) - zero).to(KIND)
    else:
        p0 = e2m1(code_of(words, 0, 4)).to(KIND)
        p1 = e2m1(code_of(words, 1, 4)).to(KIND)
        p2 = e2m1(code_of(words, 2, 4)).to(KIND)
        p3 = e2m1(code_of(words, 3, 4)).to(KIND)
    return p0, p1, p2, p3


@triton.jit
def factor(words, place: tl.constexpr, SCALES: tl.constexpr):
    """Return the scale at index `place` of the words as float32.

    Scales are 16-bit floats or exponents.
    """
    if tl.uint8 == SCALES:
        found = (((words >> (8 * place)) & 255) << 23).to(tl.float32, bitcast=True)
    else:
        bits = (words >> (16 * (place % 2))).to(tl.int16)
        found = bits.to(SCALES, bitcast=True).to(tl.float32)
    return found


@triton.jit
def load_x(x_row, k, is_token, in_features, EVEN_K: tl.constexpr):
    """Return the transpose of the tokens' columns of one plane."""
    mask = is_token
    if not EVEN_K:
        mask = mask & (k < in_features)[None, :]
    return tl.trans(tl.load(x_row + k[None, :], mask=mask, other=0.0))


@triton.jit
def step_scale(word, second, group: tl.constexpr, SCALES: tl.constexpr):
    """Return the scales of one small group of a step, `[rows, 1]`."""
    if tl.uint8 == SCALES or group < 2:
        found = factor(word, group, SCALES)
    else:
        found = factor(second, group, SCALES)
    return found[:, None]


@triton.jit
def add_step(
    acc,
    x_row,
    code_row,
    word_row,
    zeros,
    is_token,
    here,
    step,
    out_features,
    in_features,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Return `acc` plus the products of `STEP` columns; pointers are at the start of rows."""
    kind = x_row.dtype.element_ty
    SMALL: tl.constexpr = GROUP > 0 and GROUP < STEP
    PLANES: tl.constexpr = 2 if FORM == "int8" else 4
    BLOCKS: tl.constexpr = STEP // (PLANES * PLANE)
    within = tl.arange(0, PLANE)
    stride = out_features.to(tl.int64) * PLANE
    zero = biased(zeros, kind)
    first = step * STEP + within
    if GROUP > 0:
        at = step if SMALL else step // (GROUP // STEP)
        word_row += at * (WORDS * out_features)
        word = tl.load(word_row, mask=here, other=0)
        second = word
        if SMALL and tl.uint8 != SCALES and GROUP == 32:
            second = tl.load(word_row + out_features, mask=here, other=0)
        if SMALL and HAS_ZERO:
            packed = tl.load(word_row + (WORDS - 1) * out_features, mask=here, other=0)
        elif HAS_ZERO:
            zeros = (word >> 16) & 255
            zero = biased(zeros, kind)
    product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for block_of_step in tl.static_range(BLOCKS):
        words = tl.load(
            code_row + (step * BLOCKS + block_of_step) * stride,
            mask=here[:, None],
            other=0,
            eviction_policy="evict_first",
        )
        if PLANES == 4 and not (SMALL and HAS_ZERO):
            numbers = four_planes(words, zero, kind, FORM, ASM)
        for plane in tl.static_range(PLANES):
            # The columns of the tokens that belong to this plane of the step.
            x = load_x(
                x_row,
                first + (block_of_step * PLANES + plane) * PLANE,
                is_token,
                in_features,
                EVEN_K,
            )
            if SMALL and HAS_ZERO:
                zeros = packed >> (8 * ((block_of_step * PLANES + plane) * PLANE // GROUP))
                zeros = zeros & 255
                if PLANES == 4:
                    # The compiler removes the planes that are not used.
                    numbers = four_planes(words, biased(zeros, kind), kind, FORM, ASM)
            if PLANES == 2:
                weight = (code_of(words, plane, 8) - zeros[:, None]).to(tl.float32).to(kind)
            else:
                weight = numbers[plane]
            product = tl.dot(weight, x, acc=product)
            if SMALL and (block_of_step * PLANES + plane + 1) * PLANE % GROUP == 0:
                acc += product * step_scale(
                    word, second, (block_of_step * PLANES + plane) * PLANE // GROUP, SCALES
                )
                product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    if GROUP == 0:
        acc += product
    elif not SMALL:
        acc += product * factor(word, 0, SCALES)[:, None]
    return acc


@triton.jit(do_not_specialize=["num_tokens"])
def few_kernel(
    x_ptr,
    plane_ptr,
    word_ptr,
    row_scale_ptr,
    row_zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    out_features,
    in_features,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply `BLOCK_M` tokens by `BLOCK_N` rows of a quantized weight (codes).

    `plane_ptr`, `word_ptr`, `row_scale_ptr` and `row_zero_ptr` point to `codes`, `words`,
    `row_scales` and `row_zeros` of `PackedCodes`. `GROUP` is the number of columns that share a
    scale, 0 for one scale per row. `SCALES` is the dtype of the scales in words.
    """
    block = tl.program_id(0)
    part = tl.program_id(1)
    feature = block * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    here = feature < out_features
    num_steps = tl.cdiv(in_features, STEP)
    share = tl.cdiv(num_steps, SPLIT_K)
    begin = part * share
    end = tl.minimum(begin + share, num_steps)
    kind = x_ptr.dtype.element_ty
    code_row = plane_ptr + feature[:, None] * PLANE + tl.arange(0, PLANE)[None, :]
    x_row = x_ptr + token.to(tl.int64)[:, None] * in_features
    is_token = (token < num_tokens)[:, None]
    middle: tl.constexpr = 128 if FORM == "int8" else 8
    zeros = tl.full([BLOCK_N], middle, tl.int32)
    if GROUP == 0 and HAS_ZERO:
        zeros = tl.load(row_zero_ptr + feature, mask=here, other=0).to(tl.int32)
    start_next(PDL)
    wait_for_inputs(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        acc = add_step(
            acc,
            x_row,
            code_row,
            word_ptr + feature,
            zeros,
            is_token,
            here,
            step,
            out_features,
            in_features,
            FORM,
            GROUP,
            SCALES,
            WORDS,
            HAS_ZERO,
            EVEN_K,
            BLOCK_M,
            BLOCK_N,
            ASM,
        )
    if SPLIT_K > 1:
        place = tl.program_id(2) * tl.num_programs(0) + block
        before = leave_part(acc, partial_ptr, arrived_ptr, place, part, SPLIT_K, BLOCK_N, BLOCK_M)
        if before != SPLIT_K - 1:
            return
        acc = sum_parts(partial_ptr, arrived_ptr, place, SPLIT_K, BLOCK_N, BLOCK_M)
    if GROUP == 0:
        acc *= tl.load(row_scale_ptr + feature, mask=here, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + feature, mask=here, other=0.0).to(tl.float32)[:, None]
    tl.store(
        out_ptr + token.to(tl.int64)[None, :] * out_features + feature[:, None],
        acc.to(kind),
        mask=here[:, None] & (token < num_tokens)[None, :],
    )


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def widen_kernel(
    plane_ptr,
    word_ptr,
    row_scale_ptr,
    row_zero_ptr,
    out_ptr,
    first_row,
    num_rows,
    out_features,
    in_features,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the numbers of `ROWS` rows and `STEP` columns to `[num_rows, in_features]`."""
    step = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < num_rows
    feature = first_row + row
    SMALL: tl.constexpr = GROUP > 0 and GROUP < STEP
    PLANES: tl.constexpr = 2 if FORM == "int8" else 4
    BITS: tl.constexpr = 16 // PLANES
    BLOCKS: tl.constexpr = STEP // (PLANES * PLANE)
    within = tl.arange(0, PLANE)
    code_row = plane_ptr + feature[:, None] * PLANE + within[None, :]
    stride = out_features.to(tl.int64) * PLANE
    out_row = out_ptr + row.to(tl.int64)[:, None] * in_features
    kind = out_ptr.dtype.element_ty
    at = step if SMALL or GROUP == 0 else step // (GROUP // STEP)
    word_row = word_ptr + at * (WORDS * out_features) + feature
    middle: tl.constexpr = 128 if FORM == "int8" else 8
    zeros = tl.full([ROWS], middle, tl.int32)
    if GROUP == 0:
        scale = tl.load(row_scale_ptr + feature, mask=here, other=0.0).to(tl.float32)[:, None]
        if HAS_ZERO:
            zeros = tl.load(row_zero_ptr + feature, mask=here, other=0).to(tl.int32)
    else:
        word = tl.load(word_row, mask=here, other=0)
        second = word
        if SMALL and tl.uint8 != SCALES and GROUP == 32:
            second = tl.load(word_row + out_features, mask=here, other=0)
        if SMALL and HAS_ZERO:
            packed = tl.load(word_row + (WORDS - 1) * out_features, mask=here, other=0)
        if not SMALL:
            scale = factor(word, 0, SCALES)[:, None]
            if HAS_ZERO:
                zeros = (word >> 16) & 255
    for block in tl.static_range(BLOCKS):
        words = tl.load(code_row + (step * BLOCKS + block) * stride, mask=here[:, None], other=0)
        for plane in tl.static_range(PLANES):
            if SMALL:
                scale = step_scale(word, second, (block * PLANES + plane) * PLANE // GROUP, SCALES)
                if HAS_ZERO:
                    zeros = packed >> (8 * ((block * PLANES + plane) * PLANE // GROUP))
                    zeros = zeros & 255
            code = code_of(words, plane, BITS)
            if FORM == "mxfp4":
                number = e2m1(code)
            else:
                number = (code - zeros[:, None]).to(tl.float32)
            column = step * STEP + (block * PLANES + plane) * PLANE + within
            tl.store(
                out_row + column[None, :],
                (number * scale).to(kind),
                mask=here[:, None] & (column < in_features)[None, :],
            )
