"""Mamba 2's recurrence: each sequence and head has a matrix, which decays at every token."""

from functools import cache
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.state_places import StatePlaces
from kernels.table import Entry, Table

__all__ = ["MAMBA2", "Mamba2Kernels", "Mamba2Shape", "mamba2"]


class Mamba2Shape(NamedTuple):
    """The sizes of a layer's heads on this rank.

    Attributes:
        num_groups: number of groups of heads. The heads of a group share the vectors `B` and `C`.
        num_heads: number of heads, a multiple of `num_groups`.
        head_dim: elements of a head's input.
        state_dim: elements of `B` and of `C`.
    """

    num_groups: int
    num_heads: int
    head_dim: int
    state_dim: int

    @property
    def ratio(self) -> int:
        """Number of heads in a group."""
        return self.num_heads // self.num_groups

    @property
    def spans(self) -> tuple[int, int, int]:
        """Elements of a token's inputs, of its `B` and of its `C`, over all heads or groups."""
        of_groups = self.num_groups * self.state_dim
        return self.num_heads * self.head_dim, of_groups, of_groups


class Mamba2Kernels(Protocol):
    """The functions that each implementation of this op provides."""

    def mamba2(
        self,
        xbc: Tensor,
        dt: Tensor,
        heads: Tensor,
        state: Tensor,
        places: StatePlaces,
        shape: Mamba2Shape,
    ) -> Tensor:
        """Update each head's state and return the outputs; see `kernels.mamba2.mamba2`."""


MAMBA2: Table[Mamba2Kernels] = Table(
    "Mamba 2 recurrence",
    {
        "reference": Entry("kernels.mamba2.reference"),
        "cpu": Entry("kernels.mamba2.cpu", probe="kernels.cpu.library:unavailable", invariant=True),
        "triton": Entry(
            "kernels.mamba2.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
    },
    {"cpu": ("cpu",), "cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> Mamba2Kernels:
    return MAMBA2.choose(device_type).kernels


def mamba2(
    xbc: Tensor, dt: Tensor, heads: Tensor, state: Tensor, places: StatePlaces, shape: Mamba2Shape
) -> Tensor:
    """Update each head's matrix token by token, and read it with the token's `C`.

    `S` is the matrix, and `x` is the token's input. Each token computes in float32:

        t = softplus(dt + bias)
        S *= exp(-exp(log_decay) * t)
        S += B (t x)^T
        out = S^T C + skip * x

    Tokens are computed one after the other, so the result does not depend on where a sequence was
    cut into steps.

    Args:
        xbc: `[num_tokens, sum(shape.spans)]`, contiguous: the inputs of all heads, then `B` and `C`
            of all groups.
        dt: `[num_tokens, num_heads]`, the dtype of `xbc`. Tokens may have any stride.
        heads: `[3, num_heads]` float32, contiguous: `log_decay`, `bias` and `skip` of each head.
        state: `[num_slots, num_heads, state_dim, head_dim]` float32. One call never both reads and
            writes the same slot.
        places: bounds of the sequences, and slots of their states.
        shape: sizes of heads and groups.

    Returns:
        A new `[num_tokens, num_heads * head_dim]` tensor, the dtype of `xbc`.

    Source: Dao and Gu, "Transformers are SSMs", 2024, section 3, in the form of a recurrence.
    """
    return _kernels(xbc.device.type).mamba2(xbc, dt, heads, state, places, shape)
