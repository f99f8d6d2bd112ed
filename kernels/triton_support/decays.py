"""What kernels of recurrences with decays share."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """Return `log(1 + exp(x))` in float32."""
    # `exp` gets arguments of at most 20, so that it does not overflow.
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def sums_between(change, CHUNK: tl.constexpr):
    """Sum `change` over the tokens after `j` up to `i`: `[CHUNK, CHUNK]`, 0 where `j >= i`.

    The difference of two sums from the start of the chunk would lose precision after a strong
    decay.
    """
    rows = tl.arange(0, CHUNK)
    after = tl.where(rows[:, None] > rows[None, :], change[:, None], 0.0)
    return tl.cumsum(after, axis=0)
