"""Keys and values in 8-bit floats, for all Triton kernels that read or write a KV cache.

Kernels convert such numbers to the dtype of the queries. bfloat16 queries become float16 first, for
three reasons: float16 holds every E4M3 and E5M2 number exactly, a GPU converts to it in one
instruction, and probabilities have three more bits in it. Queries beyond the range of float16
become its largest number.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


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
def narrowed(x, cache_ptr):
    """Return numbers in the form of a cache; see `kernels.kv_forms.kept`."""
    kept: tl.constexpr = cache_ptr.dtype.element_ty
    if kept.primitive_bitwidth == 8:
        most = 448.0 if kept == tl.float8e4nv else 57344.0
        wide = tl.clamp(x.to(tl.float32), -most, most, propagate_nan=tl.PropagateNan.ALL)
        return wide.to(kept)
    else:
        return x
