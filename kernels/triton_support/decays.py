"""Functions that the kernels of recurrences with decays share."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Return `log(1 + exp(x))` in float32."""
    # `exp` gets arguments of at most 20, so that it does not overflow.
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
