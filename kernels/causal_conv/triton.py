"""The causal convolution in Triton: a program computes some channels of one token or one save."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs

_MAX_BLOCK = 1024


@triton.jit
def conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    reads_ptr,
    taps_ptr,
    slots_ptr,
    out_ptr,
    num_tokens,
    channels,
    x_stride,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolve a block of channels of one token, or save the inputs for the next token."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < channels
    KEPT: tl.constexpr = WIDTH - 1
    start_next(PDL)
    wait_for_inputs(PDL)
    is_token = row < num_tokens
    own_row = tl.minimum(row, num_tokens - 1)
    newest = tl.load(x_ptr + own_row * x_stride + columns, mask=inside, other=0.0)
    factor = tl.load(weight_ptr + columns * WIDTH + KEPT, mask=inside, other=0.0)
    total = newest.to(tl.float32) * factor.to(tl.float32)
    slot = tl.load(slots_ptr + tl.maximum(row - num_tokens, 0))
    for tap in tl.static_range(KEPT):
        index = tl.load(taps_ptr + row * KEPT + tap)
        is_new = index < num_tokens
        kept = tl.maximum(index - num_tokens, 0)
        read = tl.load(reads_ptr + kept // KEPT)
        before = tl.load(
            x_ptr + tl.minimum(index, num_tokens - 1) * x_stride + columns,
            mask=inside & is_new,
            other=0.0,
        )
        before += tl.load(
            state_ptr + (read * KEPT + kept % KEPT) * channels + columns,
            mask=inside & (index >= num_tokens),
            other=0.0,
        )
        factor = tl.load(weight_ptr + columns * WIDTH + tap, mask=inside, other=0.0)
        total += before.to(tl.float32) * factor.to(tl.float32)
        # A save writes the inputs that the next token of the sequence will read.
        tl.store(
            state_ptr + (slot * KEPT + tap) * channels + columns,
            before,
            mask=inside & (row >= num_tokens),
        )
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(
        out_ptr + own_row * channels + columns,
        total.to(out_ptr.dtype.element_ty),
        mask=inside & is_token,
    )


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
    """Convolve and save the last inputs in one launch; see `kernels.causal_conv.causal_conv`."""
    num_tokens, channels = x.shape
    out = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    block = min(triton.next_power_of_2(channels), _MAX_BLOCK)
    conv_kernel[(len(taps), triton.cdiv(channels, block))](
        x,
        weight,
        weight if bias is None else bias,
        state,
        reads,
        taps,
        save_slots,
        out,
        num_tokens,
        channels,
        x.stride(0),
        WIDTH=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=silu,
        BLOCK=block,
        **launch_options(x.device),
    )
    return out
