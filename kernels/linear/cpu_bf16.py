"""Linear layers in float32 whose products are bfloat16, through the C++ library.

Rows are rounded to bfloat16 as they come and the weight once, at load; products are summed, and
bias and activation computed, in float32. Twice the products a second of float32 on a CPU with
bfloat16 instructions, for errors of a product of about 2e-3; what torch calls a float32 matrix
product of medium precision.
"""

import torch
from torch import Tensor

from kernels.linear import PackedLinear
from kernels.linear.cpu import PanelLinear
from kernels.linear.cpu import pack as pack_as_it_is


class RoundedLinear(PanelLinear):
    """Panels of bfloat16 behind float32; `unpack` gives the rounded weight."""

    implementation = "cpu_bf16"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias, torch.bfloat16)


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Round and pack a float32 weight of even width; others are packed as they are."""
    if weight.dtype is not torch.float32 or weight.shape[1] % 2:
        return pack_as_it_is(weight, bias)
    return RoundedLinear(weight, bias)
