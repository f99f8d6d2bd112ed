"""Causal convolution in plain torch."""

import torch
from torch import Tensor
from torch.nn import functional


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
    num_tokens, width = len(x), weight.shape[1]
    kept = state.index_select(0, reads).flatten(0, 1)
    rows = torch.cat([x, kept])
    before = rows[taps]
    state.index_copy_(0, save_slots, before[num_tokens:])
    factors = weight.float()
    out = x.float() * factors[:, width - 1]
    for tap in range(width - 1):
        out += before[:num_tokens, tap].float() * factors[:, tap]
    if bias is not None:
        out += bias.float()
    return (functional.silu(out) if silu else out).to(x.dtype)
