"""Linear layers with quantized weights (codes) on any device, by plain products in float32.

Each weight takes 4 bytes of memory besides its code.
"""

import torch
from torch import Tensor

from kernels.group_linear import Grouped, GroupedLinear
from kernels.linear import PackedLinear
from kernels.linear import pack as pack_plain


class CodesLinear(GroupedLinear):
    """A linear layer that keeps its quantized weight (codes) and multiplies by a float32 copy."""

    implementation = "reference"

    def __init__(self, weight: Grouped, bias: Tensor | None) -> None:
        """Convert the quantized weight to float32 and pack it for products."""
        super().__init__(weight.columns, weight.rows)
        self._codes = weight.codes
        self._product = pack_plain(weight.numbers(), None if bias is None else bias.float())

    @property
    def size_bytes(self) -> int:
        return self._codes.nbytes + self._product.size_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x.float()).to(x.dtype)

    def unpack(self) -> Tensor:
        """Return the float32 numbers that the codes represent."""
        return self._product.unpack()

    def codes(self) -> Tensor:
        return self._codes

    def replace(self, other: PackedLinear) -> bool:  # noqa: ARG002  # a CPU has no graphs
        return False


def pack(weight: Grouped, bias: Tensor | None, dtype: torch.dtype) -> CodesLinear:  # noqa: ARG001
    """Return a linear layer whose weight has any form; see `kernels.group_linear.pack`."""
    return CodesLinear(weight, bias)
