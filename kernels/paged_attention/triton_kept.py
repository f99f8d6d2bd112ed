"""Keys and values in 8-bit floats, for all Triton kernels that read or write a KV cache.

Kernels convert such numbers to the dtype of the queries. bfloat16 queries become float16 first, for
three reasons: float16 holds every E4M3 and E5M2 number exactly, a GPU converts to it in one
instruction, and probabilities have three more bits in it. Queries beyond the range of float16
become its largest number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from kernels.triton_support.device import interpreted

_HAS_ASM = tl.constexpr(not interpreted())


@triton.jit
def beside(q, cache_ptr):
    """Return queries in the dtype in which they are multiplied by the cache's keys."""
    if cache_ptr.dtype.element_ty.primitive_bitwidth == 8 and q.dtype == tl.bfloat16:
        wide = tl.clamp(q.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        return wide.to(tl.float16)
    else:
        return q


@triton.jit
def widened(kept, q):
    """Return keys or values in the dtype of the queries that `beside` returned."""
    return kept.to(q.dtype)


@triton.jit
def halves(pair, cache_ptr, q):
    """Return the numbers at even and at odd columns, in the dtype of the queries.

    A matrix instruction takes the values of two neighbouring keys together. While a GPU reads
    shared memory, it can transpose 16-bit numbers, but would read 8-bit numbers one by one. So two
    8-bit numbers of a key are read as one of 16 bits.

    Args:
        pair: int16; each holds two 8-bit floats of neighbouring columns.
        cache_ptr: the cache, whose dtype the floats have.
        q: queries that `beside` returned.
    """
    kept: tl.constexpr = cache_ptr.dtype.element_ty
    if kept == tl.float8e5:
        # An E5M2 number is the upper byte of a float16.
        even = (pair << 8).to(tl.float16, bitcast=True).to(q.dtype)
        odd = (pair >> 8 << 8).to(tl.float16, bitcast=True).to(q.dtype)
    elif _HAS_ASM and q.dtype == tl.float16:
        # The compiler would take twice as many instructions. E4M3 needs a GPU that has this one.
        even, odd = tl.inline_asm_elementwise(
            "{.reg .b32 both; .reg .b16 low, high;"
            "prmt.b32 both, $2, 0, 0x4420; mov.b32 {low, high}, both;"
            "cvt.rn.f16x2.e4m3x2 $0, low;"
            "prmt.b32 both, $2, 0, 0x4431; mov.b32 {low, high}, both;"
            "cvt.rn.f16x2.e4m3x2 $1, low;}",
            "=r,=r,r",
            [pair],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even = pair.to(tl.uint8).to(kept, bitcast=True).to(q.dtype)
        odd = (pair >> 8).to(tl.uint8).to(kept, bitcast=True).to(q.dtype)
    return even, odd


@triton.jit
def narrowed(x, cache_ptr):
    """Return numbers in the form of a cache; see `kernels.kv_forms.kept`."""
    kept: tl.constexpr = cache_ptr.dtype.element_ty
    if kept.primitive_bitwidth == 8:
        most = 448.0 if kept == tl.float8e4nv else 57344.0
        wide = tl.clamp(x.to(tl.float32), -most, most, propagate_nan=tl.PropagateNan.ALL)
        return wide.to(kept)
    else:
        return x
