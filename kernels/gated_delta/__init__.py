"""The gated delta rule: linear attention over a fixed-size matrix per sequence and head."""

from functools import cache
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.state_places import StatePlaces
from kernels.table import Entry, Table

__all__ = ["GATED_DELTA", "DeltaShape", "GatedDeltaKernels", "gated_delta"]


class DeltaShape(NamedTuple):
    """The sizes of a layer's heads on this rank.

    Attributes:
        num_key_heads: number of query heads, and of key heads.
        num_value_heads: number of value heads, a multiple of `num_key_heads`. Consecutive value
            heads share a key head.
        key_dim, value_dim: elements of a key head and of a value head.
        has_flat_gates: the order of a token's gates. If true, `b` of all heads comes first, then
            `a` of all heads. Otherwise each key head has `b` of its value heads, then their `a`.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    has_flat_gates: bool = False

    @property
    def ratio(self) -> int:
        """Number of value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def gate_span(self) -> int:
        """Number of value heads whose `b` lie together, followed by their `a`."""
        return self.num_value_heads if self.has_flat_gates else self.ratio

    @property
    def width(self) -> int:
        """Elements of a token's queries, keys and values together."""
        keys = 2 * self.num_key_heads * self.key_dim
        return keys + self.num_value_heads * self.value_dim


class GatedDeltaKernels(Protocol):
    """The functions that each implementation of this op provides."""

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        places: StatePlaces,
        shape: DeltaShape,
    ) -> Tensor:
        """Update each head's state and return outputs; see `kernels.gated_delta.gated_delta`."""


GATED_DELTA: Table[GatedDeltaKernels] = Table(
    "gated delta rule",
    {
        "reference": Entry("kernels.gated_delta.reference"),
        "cpu": Entry(
            "kernels.gated_delta.cpu", probe="kernels.cpu.library:unavailable", invariant=True
        ),
        "triton": Entry(
            "kernels.gated_delta.triton",
            probe="kernels.triton_support.device:unavailable",
            invariant=True,
        ),
        "triton_chunks": Entry(
            "kernels.gated_delta.triton_chunks", probe="kernels.triton_support.device:unavailable"
        ),
    },
    {"cpu": ("cpu",), "cuda": ("triton_chunks", "triton")},
)


@cache
def _kernels(device_type: str, invariant: bool) -> GatedDeltaKernels:
    return GATED_DELTA.choose(device_type, invariant=invariant).kernels


def gated_delta(
    qkv: Tensor,
    gates: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    places: StatePlaces,
    shape: DeltaShape,
    *,
    invariant: bool = False,
) -> Tensor:
    """Update each head's matrix token by token, and read it with the token's query.

    `S` is the matrix. `q` is the query, scaled to unit length and divided by the square root of its
    size; `k` is the key, scaled to unit length; `v` is the value. Each token computes in float32:

        S *= exp(decay * softplus(a + dt_bias))
        S += k (sigmoid(b) (v - S^T k))^T
        out = S^T q

    Args:
        qkv: `[num_tokens, shape.width]`, queries, keys and values of all heads; contiguous.
        gates: `[num_tokens, 2 * num_value_heads]`, the dtype of `qkv`: `b` and `a` of each value
            head, in the order that `shape.has_flat_gates` determines. Tokens may have any stride.
        decay: `[num_value_heads]` float32, negative.
        dt_bias: `[num_value_heads]` float32.
        state: `[num_slots, num_value_heads, key_dim, value_dim]` float32. One call never both reads
            and writes the same slot.
        places: bounds of the sequences, and slots of their states.
        shape: sizes of heads.
        invariant: whether the bits of the result must not depend on where a sequence was cut into
            steps. If true, tokens are computed one after the other. If false, a GPU computes the
            tokens of a prompt in chunks.

    Returns:
        A new `[num_tokens, num_value_heads * value_dim]` tensor, the dtype of `qkv`.

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
    2024.
    """
    kernels = _kernels(qkv.device.type, invariant)
    return kernels.gated_delta(qkv, gates, decay, dt_bias, state, places, shape)
