"""The causal convolution in Triton: a program computes or saves some channels of some tokens."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# ruff: noqa: PLR0913 a kernel's parameters

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_support.launch import launch_options, start_next, wait_for_inputs

_MAX_BLOCK = 1024
# From `_MANY_ROWS` rows on, a program computes `_LARGE_TILE` rows and channels. Programs of one row
# would spend most of their time on the row's addresses.
_MANY_ROWS = 512
_LARGE_TILE = 16, 128


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
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
    num_rows,
    channels,
    x_stride,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolve a block of channels of some tokens, or save the inputs for the next token."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_row, is_channel = rows < num_rows, columns < channels
    KEPT: tl.constexpr = WIDTH - 1
    start_next(PDL)
    wait_for_inputs(PDL)
    is_token = rows < num_tokens
    is_save = (is_row & (rows >= num_tokens))[:, None] & is_channel
    own_row = tl.minimum(rows, num_tokens - 1)[:, None]
    newest = tl.load(x_ptr + own_row * x_stride + columns, mask=is_channel, other=0.0)
    factor = tl.load(weight_ptr + columns * WIDTH + KEPT, mask=is_channel, other=0.0)
    total = newest.to(tl.float32) * factor.to(tl.float32)
    save = tl.maximum(tl.minimum(rows, num_rows - 1) - num_tokens, 0)
    slot = tl.load(slots_ptr + save)[:, None]
    for tap in tl.static_range(KEPT):
        index = tl.load(taps_ptr + rows * KEPT + tap, mask=is_row, other=0)
        is_new = index < num_tokens
        kept = tl.maximum(index - num_tokens, 0)
        read = tl.load(reads_ptr + kept // KEPT)
        before = tl.load(
            x_ptr + tl.minimum(index, num_tokens - 1)[:, None] * x_stride + columns,
            mask=is_new[:, None] & is_channel,
            other=0.0,
        )
        before += tl.load(
            state_ptr + (read * KEPT + kept % KEPT)[:, None] * channels + columns,
            mask=(index >= num_tokens)[:, None] & is_channel,
            other=0.0,
        )
        factor = tl.load(weight_ptr + columns * WIDTH + tap, mask=is_channel, other=0.0)
        total += before.to(tl.float32) * factor.to(tl.float32)
        # A save writes the inputs that the next token of the sequence will read.
        tl.store(state_ptr + (slot * KEPT + tap) * channels + columns, before, mask=is_save)
    if HAS_BIAS:
        total += tl.load(bias_ptr + columns, mask=is_channel, other=0.0).to(tl.float32)
    if SILU:
        total = total * tl.sigmoid(total)
    tl.store(
        out_ptr + own_row * channels + columns,
        total.to(out_ptr.dtype.element_ty),
        mask=is_token[:, None] & is_channel,
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
    """Convolve and save in one launch; see `kernels.causal_conv.causal_conv`."""
    num_tokens, channels = x.shape
    out = torch.empty(num_tokens, channels, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    rows, most = (1, _MAX_BLOCK) if len(taps) < _MANY_ROWS else _LARGE_TILE
    block = min(triton.next_power_of_2(channels), most)
    conv_kernel[(triton.cdiv(len(taps), rows), triton.cdiv(channels, block))](
        x,
        weight,
        weight if bias is None else bias,
        state,
        reads,
        taps,
        save_slots,
        out,
        num_tokens,
        len(taps),
        channels,
        x.stride(0),
        WIDTH=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=silu,
        ROWS=rows,
        BLOCK=block,
        **launch_options(x.device),
    )
    return out
