"""Gated activations in Triton."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_support.launch import launch_options, lets_next_in, start_next, wait_for_inputs

_BLOCK = 1024


@triton.jit
def _silu_and_mul_kernel(
    x_ptr, out_ptr, width, BLOCK: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    start_next(PDL and EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + columns, mask=inside, other=0.0)
    result = gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)
    tl.store(out_ptr + row * width + columns, result.to(up.dtype), mask=inside)


def silu_and_mul(x: Tensor) -> Tensor:
    """Return `silu(gate) * up`, rounded once; see `kernels.activation.silu_and_mul`."""
    assert x.is_contiguous()
    num_tokens, width = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_tokens, width)
    if out.numel():
        grid = (num_tokens, triton.cdiv(width, _BLOCK))
        _silu_and_mul_kernel[grid](
            x,
            out,
            width,
            BLOCK=_BLOCK,
            EARLY=lets_next_in(num_tokens),
            num_warps=4,
            **launch_options(x.device),
        )
    return out
