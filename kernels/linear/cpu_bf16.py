"""Linear layers in float32 whose products are in bfloat16, in the C++ library.

Activations are rounded to bfloat16 when they arrive, and the weight once, when it is loaded.
Products are summed in float32; bias and activation are also float32. A CPU with bfloat16
instructions computes twice as many products per second as in float32. The error of a product is
about 2e-3. torch calls this a float32 matrix product of medium precision.
"""

import torch
from torch import Tensor

from kernels.linear import PackedLinear
from kernels.linear.cpu import PanelLinear
from kernels.linear.cpu import pack as pack_as_it_is


class RoundedLinear(PanelLinear):
    """A linear layer with a weight in panels of bfloat16, and float32 activations and results.

    `unpack` returns the rounded weight.
    """

    implementation = "cpu_bf16"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias, torch.bfloat16)


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Round and pack a float32 weight of even width; pack other weights without rounding."""
    if weight.dtype is not torch.float32 or weight.shape[1] % 2:
        return pack_as_it_is(weight, bias)
    return RoundedLinear(weight, bias)
