"""Describes one layer's attention, for pools, weights and layers. Front-safe: no torch."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.checkpoint.model_spec import LatentState, LayerState, PagedState, SharedState
from runtime.checkpoint.rope_json import RopeConfig


@dataclass(frozen=True)
class PositionScale:
    """Queries that grow with their positions, so that long contexts do not flatten the scores.

    A query at position `p` is multiplied by `1 + beta * ln(1 + floor(p / context))`.

    Source: Llama 4's `get_llama_4_attn_scale` in `transformers`.

    Attributes:
        beta: strength of the growth.
        context: positions of the original context, in which queries do not change.
    """

    beta: float
    context: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention.

    Attributes:
        num_heads, num_kv_heads: query heads and key/value heads of all ranks together.
        head_dim: elements of a head of queries and keys.
        value_dim: elements of a head of values, at most `head_dim`; 0 for `head_dim`.
        scale: multiplies the scores.
        window: keys that a query sees, including its own; `None` for all.
        softcap: scaled scores become `softcap * tanh(score / softcap)`; 0 leaves them.
        has_sinks: whether each head has a score without a value.
        keys_of: index of the earlier layer whose keys and values this layer reads; `None` if it
            reads its own.
        rope: rotation of queries and keys; `None` for none.
        is_whole: whether every rank computes all heads.
        has_gate: whether queries come with gates, which multiply the output of their heads.
        rotary_dim: elements of a head that rotate, the first ones; 0 for all.
        position_scale: how queries grow with their positions; `None` if they do not.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    value_dim: int = 0
    window: int | None = None
    softcap: float = 0.0
    has_sinks: bool = False
    keys_of: int | None = None
    rope: RopeConfig | None = None
    is_whole: bool = False
    has_gate: bool = False
    rotary_dim: int = 0
    position_scale: PositionScale | None = None

    @property
    def state(self) -> LayerState:
        """The state that the layer keeps of a sequence; values have pages as wide as keys."""
        if self.keys_of is not None:
            return SharedState(self.keys_of)
        return PagedState(self.num_kv_heads, self.head_dim, self.window, is_whole=self.is_whole)

    @property
    def window_left(self) -> int:
        """Most keys that a query sees besides its own, which `window` includes; -1 for all."""
        return -1 if self.window is None else self.window - 1

    def uneven_parts(self, tp_size: int) -> list[str]:
        """Return what cannot be split evenly among ranks; see `ModelSpec.uneven_parts`."""
        if self.is_whole:
            return []
        heads = self.num_kv_heads
        # With fewer key/value heads than ranks, several ranks hold a copy of one.
        shared_unevenly = heads % tp_size if heads >= tp_size else tp_size % heads
        parts = (
            (self.num_heads % tp_size, f"{self.num_heads} attention heads"),
            (shared_unevenly, f"{heads} key/value heads"),
        )
        return [what for rest, what in parts if rest]


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Attention over latents (MLA), absorbed: one key head, whose first part is the value.

    `head_dim` is `value_dim`, the latent's size, and `rope_dim` together.

    Attributes:
        query_rank: size of the latent of queries; 0 if queries are made of the hidden state.
        nope_dim: elements of a head of queries that do not rotate.
        rope_dim: elements of a head of queries that rotate.
        output_dim: elements of a head of values after the latent is expanded.
        has_split_up: whether the matrix that expands latents is stored as two: `k_b_proj`, with the
            transposed rows of keys of each head, and `v_b_proj`.
    """

    query_rank: int
    nope_dim: int
    rope_dim: int
    output_dim: int
    has_split_up: bool = False

    @property
    def state(self) -> LayerState:
        """See `AttentionSpec`."""
        return LatentState(1, self.head_dim, is_whole=True)

    def uneven_parts(self, tp_size: int) -> list[str]:
        """See `AttentionSpec`: every rank has all latents and some heads."""
        return [f"{self.num_heads} attention heads"] if self.num_heads % tp_size else []
