"""Matrix products with weights that are packed once, when they are loaded.

The implementation for a CPU was chosen by the table in `kernels/linear/cpu.py`.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from kernels.activation import Activation, Unary, act_and_mul, unary
from kernels.table import Choice, Entry, Table

if TYPE_CHECKING:
    from kernels.rounding import Rounding

__all__ = ["GATED_TOKENS", "LINEAR", "LinearKernels", "PackedLinear", "pack"]

# From this number of tokens on, an implementation may compute `PackedLinear.gated` in one kernel.
# With fewer tokens, a product and an activation as two steps are faster. On an H200, at the 8B and
# 0.5B shapes (`benchmarks.h200.products`), one kernel is 3.0 and 2.3% faster than two steps with
# 1024 tokens, and 6 and 24% slower with 512.
GATED_TOKENS = 1024


class PackedLinear(ABC):
    """A linear layer: a weight in the layout of an implementation, and a bias.

    Calling it multiplies activations by the weight.

    Attributes:
        in_features: columns of the weight.
        out_features: rows of the weight.
        implementation: name in the `LINEAR` table.
        shares_weight: whether the tensor that was packed is itself kept and used unchanged.
        rounding: how activations are rounded before the product. If it is not `None`, the product
            also takes activations that are already rounded (`kernels.rounding.RoundedTokens`).
    """

    implementation: str
    shares_weight = False
    rounding: "Rounding | None" = None

    def __init__(self, in_features: int, out_features: int) -> None:
        self.in_features = in_features
        self.out_features = out_features

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes of the packed weight and the bias."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`.

        Args:
            x: `[num_tokens, in_features]`, contiguous, the dtype of the weight.

        Returns:
            A new `[num_tokens, out_features]` tensor, the dtype of the weight.
        """

    def write(self, x: Tensor, out: Tensor) -> None:
        """Write the product of `x` to `out`, `[num_tokens, out_features]`, contiguous.

        Args:
            x: `[num_tokens, in_features]`, contiguous.
            out: a tensor of the dtype of `x`, overwritten.
        """
        out.copy_(self(x))

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """Return `activation(gate) * up`, where gate and up are halves of the product's columns.

        Args:
            x: `[num_tokens, in_features]`, contiguous, the dtype of the weight.
            activation: activation of the gate.

        Returns:
            A new `[num_tokens, out_features // 2]` tensor, the dtype of the weight.
        """
        return act_and_mul(self(x), activation)

    def gates_in_one_kernel(self, num_tokens: int) -> bool:  # noqa: ARG002  # most never do
        """Whether `gated` is faster than the product and an activation that rounds its result.

        The alternative is two kernels: the product, and an activation that rounds its result to
        codes. This matters only if the product after the activation has a `rounding`.
        """
        return False

    def activated(self, x: Tensor, activation: Unary) -> Tensor:
        """Return `activation(x @ weight.T + bias)`, a new `[num_tokens, out_features]` tensor."""
        return unary(self(x), activation)

    @abstractmethod
    def unpack(self) -> Tensor:
        """Return the `[out_features, in_features]` weight, bit for bit as it was packed.

        The tensor may share memory with the packed one: do not write to it.
        """

    @abstractmethod
    def repack(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Replace the weight in place, and the bias if it is given.

        Args:
            weight: `[out_features, in_features]`, the dtype that was packed first.
            bias: `[out_features]`, or `None` to keep the present one.

        Raises:
            ValueError: the shape or dtype differs from what was packed first.
        """


class LinearKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def pack(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Return a linear layer with a packed weight; see `kernels.linear.pack`."""


LINEAR: Table[LinearKernels] = Table(
    "linear",
    {
        "reference": Entry("kernels.linear.reference"),
        "cpu": Entry("kernels.linear.cpu", probe="kernels.cpu.library:unavailable", invariant=True),
        "cpu_bf16": Entry(
            "kernels.linear.cpu_bf16", probe="kernels.cpu.library:unavailable", invariant=True
        ),
        "mkldnn": Entry("kernels.linear.mkldnn", probe="kernels.linear.mkldnn:unavailable"),
        "triton": Entry("kernels.linear.triton", probe="kernels.triton_support.device:unavailable"),
        "triton_invariant": Entry(
            "kernels.linear.triton_invariant",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cpu": ("cpu", "mkldnn"), "cuda": ("triton", "reference", "triton_invariant")},
)


def choose(device_type: str, wanted: str | None = None) -> Choice[LinearKernels]:
    """Return the implementation for a device type; see `kernels.table.Table.choose`."""
    return LINEAR.choose(device_type, wanted)


def pack(
    weight: Tensor, bias: Tensor | None = None, implementation: str | None = None
) -> PackedLinear:
    """Pack a weight for fast products.

    The packed layout replaces the given one: drop `weight` afterwards, or both stay in memory. Only
    implementations with `shares_weight` keep the tensor itself.

    Args:
        weight: `[out_features, in_features]`, float16, bfloat16 or float32, contiguous.
        bias: `[out_features]`, the dtype of `weight`, or `None`.
        implementation: a name in `LINEAR`; `None` for the fastest on the weight's device.

    Raises:
        ValueError: `implementation` is unknown.
        RuntimeError: `implementation` cannot run here.
    """
    return choose(weight.device.type, implementation).kernels.pack(weight, bias)
