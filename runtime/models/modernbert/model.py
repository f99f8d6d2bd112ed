"""ModernBERT: an encoder with rotary embeddings, windows and gated feed-forward blocks.

A norm precedes attention and the feed-forward block of each layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.activation import unary
from runtime.models.attention.backend import AttentionLayer
from runtime.models.attention.packed import attend_packed
from runtime.models.encoder_batch import EncoderBatch
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.embedding import Embedding
from runtime.models.layers.linear import Linear, column, heads
from runtime.models.layers.norm import LayerNorm
from runtime.models.layers.parameter import WeightHolder
from runtime.models.layers.rope import RopeTables
from runtime.models.layers.text_head import TextHead
from runtime.models.model import TextEncoder
from runtime.models.modernbert.spec import ModernBertSpec


class ModernBertLayer:
    """One encoder layer: attention and a gated feed-forward block, added to the residual stream."""

    def __init__(
        self, spec: ModernBertSpec, context: BuildContext, layer_idx: int, ropes: RopeTables
    ) -> None:
        hidden, inner = spec.hidden_size, spec.intermediate_size
        head_dim = hidden // spec.num_heads
        is_windowed = layer_idx in spec.windowed_layers
        self.attn_norm = _norm(spec, context) if layer_idx else None
        self.mlp_norm = _norm(spec, context)
        of_rank = heads("", spec.num_heads, head_dim, context)
        num_heads = of_rank.length // head_dim
        self.attn_in = Linear.stacked(hidden, of_rank, 3, spec.attention_bias, context)
        self.attn_out = Linear.row_parallel(hidden, hidden, spec.attention_bias, context)
        self.mlp_in = Linear.stacked(hidden, column("", inner, context), 2, spec.mlp_bias, context)
        self.mlp_out = Linear.row_parallel(inner, hidden, spec.mlp_bias, context)
        self._activation = spec.activation
        self._attention = AttentionLayer(
            layer_idx=layer_idx,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            cos_sin=ropes.table(spec.windowed_rope if is_windowed else spec.rope, head_dim),
            window_left=spec.window if is_windowed else -1,
            is_rounded=context.rounds_products,
        )

    def forward(self, stream: Tensor, batch: EncoderBatch) -> None:
        """Add the outputs of both blocks to `stream`, `[num_tokens, hidden_size]`, in place."""
        normed = stream if self.attn_norm is None else self.attn_norm.forward(stream)
        qkv = self.attn_in.apply(normed)
        attended = attend_packed(self._attention, qkv, batch.positions, batch.lengths)
        stream.add_(self.attn_out.apply(attended))
        inner, gate = self.mlp_in.apply(self.mlp_norm.forward(stream)).chunk(2, dim=-1)
        stream.add_(self.mlp_out.apply(unary(inner, self._activation).mul_(gate)))

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""
        if self.attn_norm is not None:
            yield f"{prefix}.attn_norm", self.attn_norm
        yield f"{prefix}.mlp_norm", self.mlp_norm
        yield f"{prefix}.attn.Wqkv", self.attn_in
        yield f"{prefix}.attn.Wo", self.attn_out
        yield f"{prefix}.mlp.Wi", self.mlp_in
        yield f"{prefix}.mlp.Wo", self.mlp_out


class ModernBertModel(TextEncoder):
    """A ModernBERT encoder: embeddings, layers, and the head that gives vectors or scores."""

    def __init__(self, spec: ModernBertSpec, context: BuildContext) -> None:
        self.spec, self.context = spec, context
        ropes = RopeTables(context.max_positions or spec.context_len, context.device)
        self.words = Embedding(spec.vocab_size, spec.hidden_size, context, tied=False)
        self.norm = _norm(spec, context)
        self.layers = [
            ModernBertLayer(spec, context, layer_idx, ropes) for layer_idx in range(spec.num_layers)
        ]
        self.final_norm = _norm(spec, context)
        self.head = TextHead(spec.pooling, context)

    def forward(self, batch: EncoderBatch) -> Tensor:
        stream = self.norm.forward(self.words.forward(batch.input_ids))
        for layer in self.layers:
            layer.forward(stream, batch)
        return self.final_norm.forward(stream)

    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        yield "embeddings.tok_embeddings", self.words
        yield "embeddings.norm", self.norm
        for layer_idx, layer in enumerate(self.layers):
            yield from layer.holders(f"layers.{layer_idx}")
        yield "final_norm", self.final_norm
        yield from self.head.holders()


def _norm(spec: ModernBertSpec, context: BuildContext) -> LayerNorm:
    return LayerNorm(spec.hidden_size, spec.norm_eps, context, has_bias=spec.norm_bias)
