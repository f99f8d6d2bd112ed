"""Gated activations through the C++ library; float16 goes to the reference."""

import torch
from torch import Tensor

from kernels.activation import reference
from kernels.cpu.library import DTYPES, library

_silu_and_mul = library().hr_silu_and_mul


def silu_and_mul(x: Tensor) -> Tensor:
    """Return `silu(gate) * up`; see `kernels.activation.silu_and_mul`."""
    dtype = x.dtype
    if dtype not in DTYPES:
        return reference.silu_and_mul(x)
    assert x.is_contiguous()
    tokens, width = x.shape
    out = x.new_empty(tokens, width // 2)
    _silu_and_mul(
        dtype is torch.bfloat16,
        x.data_ptr(),
        out.data_ptr(),
        tokens,
        width // 2,
        torch.get_num_threads(),
    )
    return out
