"""Linear layers through the C++ library: weights packed once into panels."""

import torch
from torch import Tensor

from kernels.cpu.library import DTYPES, library
from kernels.linear import PackedLinear
from kernels.linear.reference import TorchLinear

_library = library()
_linear = _library.hr_linear


class PanelLinear(PackedLinear):
    """A weight in panels of output columns; the plain bytes, rows padded to a whole panel."""

    implementation = "cpu"

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        columns: int = _library.hr_panel_columns()
        panels = -(-self.out_features // columns)
        self.dtype = weight.dtype
        self.bias = None if bias is None else bias.contiguous()
        self._is_bf16 = weight.dtype is torch.bfloat16
        self._packed = torch.empty(panels * columns * self.in_features, dtype=weight.dtype)
        self._packed_address = self._packed.data_ptr()
        self.repack(weight)

    @property
    def size_bytes(self) -> int:
        return self._packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        assert x.dtype is self.dtype
        tokens, in_features = x.shape
        assert in_features == self.in_features
        out = x.new_empty(tokens, self.out_features)
        bias = self.bias
        _linear(
            self._is_bf16,
            x.data_ptr(),
            self._packed_address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            tokens,
            in_features,
            self.out_features,
            torch.get_num_threads(),
        )
        return out

    def unpack(self) -> Tensor:
        weight = torch.empty(self.out_features, self.in_features, dtype=self.dtype)
        _library.hr_linear_unpack(
            self._is_bf16,
            self._packed_address,
            weight.data_ptr(),
            self.in_features,
            self.out_features,
            torch.get_num_threads(),
        )
        return weight

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.shape != (self.out_features, self.in_features) or weight.dtype != self.dtype:
            raise ValueError(
                f"weight {tuple(weight.shape)} {weight.dtype} does not fit "
                f"({self.out_features}, {self.in_features}) {self.dtype}"
            )
        weight = weight.contiguous()
        _library.hr_linear_pack(
            self._is_bf16,
            weight.data_ptr(),
            self._packed_address,
            self.in_features,
            self.out_features,
            torch.get_num_threads(),
        )
        self.bias = self.bias if bias is None else bias.contiguous()


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Pack a bfloat16 or float32 weight; other dtypes and odd bfloat16 widths stay with torch."""
    if weight.dtype not in DTYPES or weight.shape[1] % 2:
        return TorchLinear(weight, bias)
    return PanelLinear(weight, bias)
