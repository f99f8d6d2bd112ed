"""Optional changes of attention's scores, for all Triton attention kernels: soft cap and sinks."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math

import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def soft_capped(scores, cap_log2):
    """Return `cap * tanh(scores / cap)`; `cap`, scores and result are multiplied by `log2(e)`."""
    # tanh(x) = 1 - 2 / (e^2x + 1); an infinite power gives the cap itself.
    power = tl.exp2(scores * (2.0 * LOG2E / cap_log2))
    return cap_log2 - 2.0 * cap_log2 / (power + 1.0)


@triton.jit
def with_sink(total, best, sinks_ptr, head, held):
    """Return a softmax's sum, `total`, plus the sinks of the heads.

    `total` is relative to `2 ** best`.
    """
    sink = tl.load(sinks_ptr + head, mask=held, other=0.0) * LOG2E
    # Without any key `best` is -inf and the values are 0, so any finite sum gives the result 0.
    return total + tl.exp2(sink - tl.where(best == float("-inf"), 0.0, best))


def score_options(softcap: float, sinks: Tensor | None) -> dict[str, bool]:
    """Return the compile-time parameters that soft cap and sinks determine."""
    return {"CAPPED": softcap != 0.0, "SINKS": sinks is not None}
