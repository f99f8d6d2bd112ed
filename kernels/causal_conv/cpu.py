"""The causal convolution in the C++ library; float16 uses the reference."""

import torch
from torch import Tensor

from kernels.causal_conv import reference
from kernels.cpu.library import DTYPES, library

_MAX_WIDTH = 64
_causal_conv = library().hr_causal_conv


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    reads: Tensor,
    taps: Tensor,
    save_slots: Tensor,
    silu: bool = False,
) -> Tensor:
    """Convolve and save the last inputs; see `kernels.causal_conv.causal_conv`."""
    if x.dtype not in DTYPES:
        return reference.causal_conv(x, weight, bias, state, reads, taps, save_slots, silu)
    assert x.stride(1) == 1
    assert weight.shape[1] <= _MAX_WIDTH
    assert weight.is_contiguous()
    assert state.is_contiguous()
    assert taps.is_contiguous()
    assert x.dtype is weight.dtype is state.dtype
    num_tokens, channels = x.shape
    out = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
    _causal_conv(
        x.dtype is torch.bfloat16,
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        state.data_ptr(),
        reads.data_ptr(),
        taps.data_ptr(),
        save_slots.data_ptr(),
        out.data_ptr(),
        num_tokens,
        len(taps),
        channels,
        weight.shape[1],
        silu,
        torch.get_num_threads(),
    )
    return out
