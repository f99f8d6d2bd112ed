"""A short causal convolution over each channel of several sequences, which go on from a state."""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["CAUSAL_CONV", "CausalConvKernels", "causal_conv"]


class CausalConvKernels(Protocol):
    """The functions of an implementation of this op."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        reads: Tensor,
        taps: Tensor,
        save_slots: Tensor,
        silu: bool = False,
    ) -> Tensor:
        """See `kernels.causal_conv.causal_conv`."""


CAUSAL_CONV: Table[CausalConvKernels] = Table(
    "causal convolution",
    {
        "reference": Entry("kernels.causal_conv.reference"),
        "cpu": Entry(
            "kernels.causal_conv.cpu", probe="kernels.cpu.library:unavailable", invariant=True
        ),
        "triton": Entry(
            "kernels.causal_conv.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cpu": ("cpu",), "cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> CausalConvKernels:
    return CAUSAL_CONV.choose(device_type).kernels


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
    """Convolve each channel with what precedes it in its sequence, and save the last inputs.

    Output `t` is the sum over `j` of `weight[:, j]` times input `t - width + 1 + j`, added in that
    order in float32 after the product of the newest input, and rounded once. So the result does not
    depend on where a sequence was cut into steps.

    Args:
        x: `[num_tokens, channels]`, the new inputs; channels contiguous, tokens at any stride.
        weight: `[channels, width]`, the dtype of `x`.
        bias: `[channels]`; `None` for none.
        state: `[num_slots, width - 1, channels]`, the last inputs of sequences, the oldest first;
            the dtype of `x`. No slot is both read and written.
        reads: `[num_seqs]` int64, slot of each sequence.
        taps: `[num_tokens + num_saves, width - 1]` int64: for each token and each save the inputs
            that precede it, the oldest first: an index into the rows of `x`, followed by
            `width - 1` rows of each sequence's state.
        save_slots: `[num_saves]` int64, slots that are written.
        silu: whether SiLU is applied before rounding.

    Returns:
        `[num_tokens, channels]`, new.

    Source: the short convolutions of Mamba (Gu and Dao, 2023) and LFM2.
    """
    kernels = _kernels(x.device.type)
    return kernels.causal_conv(x, weight, bias, state, reads, taps, save_slots, silu)
