"""Describes the attention of one layer, for KV pools, weights and layers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.checkpoint.model_spec import LatentState, LayerState, PagedState, SharedState
from runtime.checkpoint.rope_json import RopeConfig


@dataclass(frozen=True)
class PositionScale:
    """A factor on queries that grows with their positions; it keeps scores sharp in long contexts.

    A query at position `p` is multiplied by `1 + beta * ln(1 + floor(p / context))`.

    Source: `get_llama_4_attn_scale` of Llama 4 in `transformers`.

    Attributes:
        beta: strength of the growth.
        context: number of positions of the original context, in which the factor is 1.
    """

    beta: float
    context: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The attention of one layer.

    Attributes:
        num_heads, num_kv_heads: query heads and key/value heads of all ranks together.
        head_dim: elements of a head of queries and keys.
        value_dim: elements of a head of values, at most `head_dim`; 0 means `head_dim`.
        scale: factor of the scores.
        window: number of keys that a query attends to, with its own; `None` for all.
        softcap: scaled scores become `softcap * tanh(score / softcap)`; 0 leaves them unchanged.
        has_sinks: whether each head has an attention sink, a score without a value.
        keys_of: index of the earlier layer whose keys and values this layer reads; `None` if it
            has its own.
        rope: rotation of queries and keys; `None` for none.
        is_whole: whether every rank computes all heads.
        has_gate: whether each query head has a gate, which multiplies the head's output.
        rotary_dim: how many elements of a head rotate, the first ones; 0 means all.
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
        """What the layer keeps of a sequence between steps."""
        if self.keys_of is not None:
            return SharedState(self.keys_of)
        return PagedState(self.num_kv_heads, self.head_dim, self.window, is_whole=self.is_whole)

    @property
    def window_left(self) -> int:
        """How many earlier keys a query attends to (`window` also counts its own key).

        -1 for all.
        """
        return -1 if self.window is None else self.window - 1

    def uneven_parts(self, tp_size: int) -> list[str]:
        """Return what the ranks cannot share evenly, such as `3 attention heads`."""
        if self.is_whole:
            return []
        heads = self.num_kv_heads
        # With fewer key/value heads than ranks, several ranks have a copy of the same head.
        shared_unevenly = heads % tp_size if heads >= tp_size else tp_size % heads
        parts = (
            (self.num_heads % tp_size, f"{self.num_heads} attention heads"),
            (shared_unevenly, f"{heads} key/value heads"),
        )
        return [what for rest, what in parts if rest]


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec(AttentionSpec):
    """Attention over latents (MLA) in absorbed form: one key head, whose first part is the value.

    `head_dim` is the sum of `value_dim`, the size of the latent, and `rope_dim`.

    Attributes:
        query_rank: size of the latent of queries; 0 if queries are computed from the hidden state.
        nope_dim: elements of a query head that do not rotate.
        rope_dim: elements of a query head that rotate.
        output_dim: elements of a value head after the latent is expanded.
        has_split_up: whether the matrix that expands latents is stored in two parts: `k_b_proj`,
            with the keys' rows of each head transposed, and `v_b_proj`.
    """

    query_rank: int
    nope_dim: int
    rope_dim: int
    output_dim: int
    has_split_up: bool = False

    @property
    def state(self) -> LayerState:
        """What the layer keeps of a sequence between steps: a latent for each token."""
        return LatentState(1, self.head_dim, is_whole=True)

    def uneven_parts(self, tp_size: int) -> list[str]:
        """Return what the ranks cannot share evenly: query heads, if any; latents are not split."""
        return [f"{self.num_heads} attention heads"] if self.num_heads % tp_size else []
