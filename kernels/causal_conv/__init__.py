"""A short causal convolution over each channel; each sequence continues from its saved inputs."""

from functools import cache
from typing import Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["CAUSAL_CONV", "CausalConvKernels", "causal_conv"]


class CausalConvKernels(Protocol):
    """The functions that each implementation of this op provides."""

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
        """Convolve and save the last inputs; see `kernels.causal_conv.causal_conv`."""


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
    """Convolve each channel with the earlier inputs of its sequence, and save the last inputs.

    Output `t` is the sum over `j` of `weight[:, j]` times input `t - width + 1 + j`. The sum begins
    with the newest input's product and adds the others in the order of `j`, in float32; it is
    rounded once. The result therefore does not depend on where a sequence was cut into steps.

    Args:
        x: `[num_tokens, channels]`, the new inputs. The channels of a token are contiguous; tokens
            may have any stride.
        weight: `[channels, width]`, the dtype of `x`.
        bias: `[channels]`, or `None`.
        state: `[num_slots, width - 1, channels]`, the last inputs of sequences, the oldest first;
            the dtype of `x`. One call never both reads and writes the same slot.
        reads: `[num_seqs]` int64, the slot of each sequence's state.
        taps: `[num_tokens + num_saves, width - 1]` int64: for each token, the indices of the inputs
            before it, the oldest first; then for each saved state, the indices of the inputs to
            save. Indices count the rows of `x`, followed by `width - 1` rows of each sequence's
            state.
        save_slots: `[num_saves]` int64, the slots of `state` that are overwritten with inputs, for
            later calls.
        silu: whether SiLU is applied before rounding.

    Returns:
        A new `[num_tokens, channels]` tensor, the dtype of `x`.

    Source: the short convolutions of Mamba (Gu and Dao, 2023) and LFM2.
    """
    kernels = _kernels(x.device.type)
    return kernels.causal_conv(x, weight, bias, state, reads, taps, save_slots, silu)
