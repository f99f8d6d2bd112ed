"""Linear layers in the C++ library, whose weights are packed once into panels of columns.

One layout serves every number of tokens. So it is used on a CPU for every shape, and the unpacked
copy can be dropped. The table has medians in microseconds, bfloat16, 2 threads of an AMD EPYC with
AVX-512 BF16, torch 2.13. It is one run on a quiet machine, made when the panels still ran on OpenMP
threads. `python -m benchmarks.cpu_kernels --only linear` measures the same shapes again:

    out x in, tokens          here    mkldnn   F.linear
    640 x 384, 1               8.6      28.4       39.8
    640 x 384, 32             38.9      51.2       62.9
    384 x 1024, 1              7.6      21.9       36.9
    8192 x 384, 1             48.3      65.3      175.0
    8192 x 384, 512           7531      7470       7887
    1152 x 896, 8             42.0      58.8       88.9
    9728 x 896, 1              125       153        400
    9728 x 896, 512          19968     20084      21129
    896 x 4864, 1             64.1      82.5        204
    896 x 4864, 512           9783     10093      10189
    151936 x 896, 1           8135      9329      15177
    151936 x 896, 32         22076     23451      34137

In float32 the difference is similar with few tokens, and there is none with many tokens. Without
AVX-512 BF16, the same panels are converted in registers. This is still faster than oneDNN: 384 x
1024 with 64 tokens takes 226 instead of 902 microseconds on AVX-512 without BF16. Without any
AVX-512, oneDNN does not pack bfloat16 at all.

On a Xeon with AMX (2 threads, torch 2.11) the panels are read as tiles. Microseconds on this
machine:

    out x in, tokens          here    mkldnn
    640 x 384, 1               9.2      21.0
    9728 x 896, 32             540       499
    9728 x 896, 512           4678      8193
    1152 x 896, 512            710       387

oneDNN is faster for some products of many tokens, but not by enough to hold every weight twice.

A row's result has the same bits in any batch: each output is one chain of additions.
"""

import torch
from torch import Tensor

from kernels.activation import Unary
from kernels.cpu.library import DTYPES, library
from kernels.linear import PackedLinear
from kernels.linear.reference import TorchLinear

_library = library()
_linear = _library.hr_linear
# Activations fused into a product; see kernels/cpu/unary.h.
_FUSED: dict[Unary, int] = {"gelu": 1}


class PanelLinear(PackedLinear):
    """A linear layer with an unquantized weight, stored in panels of output columns.

    Rows of the weight are padded to whole panels.
    """

    implementation = "cpu"

    def __init__(
        self, weight: Tensor, bias: Tensor | None, packed_dtype: torch.dtype | None = None
    ) -> None:
        """Pack `weight`. A `packed_dtype` of bfloat16 rounds a float32 weight."""
        super().__init__(weight.shape[1], weight.shape[0])
        columns: int = _library.hr_panel_columns()
        panels = -(-self.out_features // columns)
        self.dtype = weight.dtype
        self.bias = None if bias is None else bias.contiguous()
        self._packed_dtype = packed_dtype or weight.dtype
        self._is_bf16 = self._packed_dtype is torch.bfloat16
        self._kind = 2 if self._is_bf16 and self.dtype is torch.float32 else int(self._is_bf16)
        self._packed = torch.empty(panels * columns * self.in_features, dtype=self._packed_dtype)
        self._packed_address = self._packed.data_ptr()
        self.repack(weight)

    @property
    def size_bytes(self) -> int:
        return self._packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, 0)

    def activated(self, x: Tensor, activation: Unary) -> Tensor:
        number = _FUSED.get(activation)
        return super().activated(x, activation) if number is None else self._product(x, number)

    def _product(self, x: Tensor, activation: int) -> Tensor:
        assert x.is_contiguous()
        assert x.dtype is self.dtype
        tokens, in_features = x.shape
        assert in_features == self.in_features
        out = x.new_empty(tokens, self.out_features)
        bias = self.bias
        _linear(
            self._kind,
            x.data_ptr(),
            self._packed_address,
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            tokens,
            in_features,
            self.out_features,
            activation,
            torch.get_num_threads(),
        )
        return out

    def unpack(self) -> Tensor:
        weight = torch.empty(self.out_features, self.in_features, dtype=self._packed_dtype)
        _library.hr_linear_unpack(
            self._is_bf16,
            self._packed_address,
            weight.data_ptr(),
            self.in_features,
            self.out_features,
            torch.get_num_threads(),
        )
        return weight.to(self.dtype)

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.shape != (self.out_features, self.in_features) or weight.dtype != self.dtype:
            raise ValueError(
                f"weight {tuple(weight.shape)} {weight.dtype} does not fit "
                f"({self.out_features}, {self.in_features}) {self.dtype}"
            )
        weight = weight.to(self._packed_dtype).contiguous()
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
    """Return a linear layer with a packed weight; see `kernels.linear.pack`.

    Other dtypes, and bfloat16 weights of odd width, use torch.
    """
    if weight.dtype not in DTYPES or weight.shape[1] % 2:
        return TorchLinear(weight, bias)
    return PanelLinear(weight, bias)
