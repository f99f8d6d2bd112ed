"""Products in plain torch with the decoded weight; `x` is not rounded to 8 bits.

The weight is converted to float32 once, which takes 4 bytes per number in addition to the stored
bytes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.quantized_linear import QuantizedLinear, StoredMatrix
from kernels.quantized_linear.decode import decode


class DequantizedLinear(QuantizedLinear):
    """A linear layer that keeps GGUF's stored bytes and multiplies by a float32 copy."""

    implementation = "reference"

    def __init__(
        self, parts: Sequence[StoredMatrix], in_features: int, bias: Tensor | None
    ) -> None:
        super().__init__(parts, in_features)
        self.bias = bias
        self._parts = list(parts)
        self._weight = self._decoded()

    def _decoded(self) -> Tensor:
        return torch.cat([decode(part.form, part.data) for part in self._parts])

    @property
    def size_bytes(self) -> int:
        bias = 0 if self.bias is None else self.bias.nbytes
        return self._weight.nbytes + sum(part.data.nbytes for part in self._parts) + bias

    def __call__(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(x.float(), self._weight, bias).to(x.dtype)

    def rows(self, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return functional.embedding(ids, self._weight).to(dtype)

    def stored(self) -> list[StoredMatrix]:
        return list(self._parts)

    def repack_stored(self, parts: Sequence[StoredMatrix]) -> None:
        self.check_same(parts)
        self._parts = list(parts)
        self._weight.copy_(self._decoded())


def pack(parts: Sequence[StoredMatrix], in_features: int, bias: Tensor | None) -> DequantizedLinear:
    """Return a linear layer that multiplies in float32; see `kernels.quantized_linear.pack`."""
    return DequantizedLinear(parts, in_features, bias)


def look_up(stored: StoredMatrix, in_features: int, ids: Tensor) -> Tensor:  # noqa: ARG001
    """Return rows of a stored matrix; see `kernels.quantized_linear.look_up`."""
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= stored.out_features):
        raise IndexError(f"row ids outside [0, {stored.out_features})")
    return decode(stored.form, stored.data[ids])
