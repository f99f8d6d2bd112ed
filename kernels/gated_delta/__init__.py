"""The gated delta rule: linear attention over a matrix of fixed size for each sequence and head."""

from functools import cache
from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.table import Entry, Table

__all__ = ["GATED_DELTA", "DeltaPlaces", "DeltaShape", "GatedDeltaKernels", "gated_delta"]


class DeltaShape(NamedTuple):
    """Sizes of the heads of a layer on this rank.

    Attributes:
        num_key_heads: heads of queries, and of keys.
        num_value_heads: heads of values, a multiple of `num_key_heads`; consecutive value heads
            share a key head.
        key_dim, value_dim: elements of a head.
        has_flat_gates: whether a token's `b` of all heads precede its `a` of all heads; otherwise
            the `b` of each key head's value heads precede their `a`.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    has_flat_gates: bool = False

    @property
    def ratio(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def gate_span(self) -> int:
        """Value heads whose `b` lie together, followed by their `a`."""
        return self.num_value_heads if self.has_flat_gates else self.ratio

    @property
    def width(self) -> int:
        """Elements of a token's queries, keys and values."""
        keys = 2 * self.num_key_heads * self.key_dim
        return keys + self.num_value_heads * self.value_dim


class DeltaPlaces(NamedTuple):
    """Where the sequences of a step begin and end, and where their states are.

    Attributes:
        qo_indptr: `[num_seqs + 1]` int32, bounds of each sequence's tokens.
        reads: `[num_seqs]` int64, slot of each sequence's state ahead of its tokens.
        save_indptr: `[num_seqs + 1]` int32, bounds of each sequence's saves.
        save_ends: `[num_saves]` int64, index in the step of the token behind the last one that a
            saved state has seen; ascending within a sequence, the last one is the sequence's end.
        save_slots: `[num_saves]` int64, slots that are written.
        is_decode: whether each sequence has one token.
    """

    qo_indptr: Tensor
    reads: Tensor
    save_indptr: Tensor
    save_ends: Tensor
    save_slots: Tensor
    is_decode: bool


class GatedDeltaKernels(Protocol):
    """The functions of an implementation of this op."""

    def gated_delta(
        self,
        qkv: Tensor,
        gates: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        places: DeltaPlaces,
        shape: DeltaShape,
    ) -> Tensor:
        """See `kernels.gated_delta.gated_delta`."""


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
    },
    {"cpu": ("cpu",), "cuda": ("triton",)},
)


@cache
def _kernels(device_type: str) -> GatedDeltaKernels:
    return GATED_DELTA.choose(device_type).kernels


def gated_delta(
    qkv: Tensor,
    gates: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    places: DeltaPlaces,
    shape: DeltaShape,
) -> Tensor:
    """Update each head's matrix token by token, and read it with the token's query.

    With unit queries `q` (divided by the root of their size) and unit keys `k`, a token does this,
    in float32: `S *= exp(decay * softplus(a + dt_bias))`, `S += k (sigmoid(b) (v - S^T k))^T`,
    `out = S^T q`. Tokens are computed one after the other, so the result does not depend on where a
    sequence was cut into steps.

    Args:
        qkv: `[num_tokens, shape.width]`, queries, keys and values of all heads; contiguous.
        gates: `[num_tokens, 2 * num_value_heads]`: `b` and `a` of each value head in the order
            that `shape` says; the dtype of `qkv`, tokens at any stride.
        decay: `[num_value_heads]` float32, negative.
        dt_bias: `[num_value_heads]` float32.
        state: `[num_slots, num_value_heads, key_dim, value_dim]` float32. No slot is both read and
            written.
        places: where sequences and their states are.
        shape: sizes of heads.

    Returns:
        `[num_tokens, num_value_heads * value_dim]`, the dtype of `qkv`, new.

    Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
    2024.
    """
    kernels = _kernels(qkv.device.type)
    return kernels.gated_delta(qkv, gates, decay, dt_bias, state, places, shape)
