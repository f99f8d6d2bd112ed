"""Gated activations in plain torch."""

from torch import Tensor
from torch.nn import functional


def silu_and_mul(x: Tensor) -> Tensor:
    """Return `silu(gate) * up`; see `kernels.activation.silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up
