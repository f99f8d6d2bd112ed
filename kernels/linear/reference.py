"""Linear layers by `torch.nn.functional.linear`, without packing."""

from torch import Tensor
from torch.nn import functional

from kernels.linear import PackedLinear


class TorchLinear(PackedLinear):
    """A linear layer with an unchanged weight, computed by torch."""

    implementation = "reference"
    shares_weight = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0])
        self.weight = weight
        self.bias = bias

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def unpack(self) -> Tensor:
        return self.weight

    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.shape != self.weight.shape or weight.dtype != self.weight.dtype:
            raise ValueError(
                f"weight {weight.shape} {weight.dtype} does not fit {self.weight.shape}"
            )
        # The weight is copied in place, because CUDA graphs hold the address and a tied head shares
        # the tensor with the embeddings.
        if weight.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(weight)
        if self.bias is None:
            self.bias = bias
        elif bias is not None and bias is not self.bias:
            self.bias.copy_(bias)


def pack(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Return a linear layer with the weight unchanged; see `kernels.linear.pack`."""
    return TorchLinear(weight, bias)
