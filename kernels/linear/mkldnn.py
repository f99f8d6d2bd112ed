"""Linear layers in oneDNN with weights that are reordered once.

`F.linear` reorders the weight on every call. This implementation uses two private torch ops
(`mkldnn._reorder_linear_weight`, `mkldnn._linear_pointwise`), so the probe first tries them on a
small product.
"""

from functools import cache

import torch
from torch import Tensor

from kernels.linear import PackedLinear
from kernels.linear.reference import TorchLinear


@cache
def unavailable() -> str | None:
    """Return why the private oneDNN ops cannot be used here, or None."""
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    try:
        weight = torch.ones(16, 32, dtype=torch.float32)
        packed = _reorder(weight)
        product = torch.ops.mkldnn._linear_pointwise(weight, packed, None, "none", [], "")
    except (RuntimeError, AttributeError, TypeError) as error:
        return f"oneDNN's packed linear does not work with torch {torch.__version__}: {error}"
    return None if torch.equal(product, weight @ weight.T) else "oneDNN's packed linear is wrong"


@cache
def _supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs `dtype` on this CPU: bfloat16 needs AVX-512, float16 newer CPUs."""
    try:
        _reorder(torch.ones(16, 32, dtype=dtype))
    except RuntimeError:
        return False
    # float16 was not measured.
    return dtype in (torch.bfloat16, torch.float32)


def _reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


class MkldnnLinear(PackedLinear):
    """A linear layer whose weight is in oneDNN's blocked layout, about as large as unpacked."""

    implementation = "mkldnn"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self.dtype = weight.dtype
        self.bias = bias
        self._packed = _reorder(weight)
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    @property
    def size_bytes(self) -> int:
        weight_bytes = self.in_features * self.out_features * self.dtype.itemsize
        return weight_bytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._linear(x, self._packed, self.bias, "none", [], "")

    def unpack(self) -> Tensor:
        return self._packed.to_dense(self.dtype)

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.shape != (self.out_features, self.in_features) or weight.dtype != self.dtype:
            raise ValueError(
                f"weight {tuple(weight.shape)} {weight.dtype} does not fit "
                f"({self.out_features}, {self.in_features}) {self.dtype}"
            )
        self._packed = _reorder(weight)
        self.bias = self.bias if bias is None else bias


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Reorder the weight; a dtype that oneDNN does not pack on this CPU uses torch."""
    if not _supports(weight.dtype):
        return TorchLinear(weight, bias)
    return MkldnnLinear(weight, bias)
