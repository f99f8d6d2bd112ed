"""BERT: an encoder with learned positions and a norm after each half of a layer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels.encoder_attention import encoder_attention
from runtime.models.bert.spec import BertSpec
from runtime.models.encoder_batch import EncoderBatch
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.embedding import Embedding
from runtime.models.layers.linear import Linear, column, heads
from runtime.models.layers.norm import LayerNorm
from runtime.models.layers.parameter import WeightHolder
from runtime.models.layers.text_head import TextHead
from runtime.models.model import TextEncoder


class BertLayer:
    """One encoder layer: attention and a feed-forward block, each followed by an add and a norm."""

    def __init__(self, spec: BertSpec, context: BuildContext) -> None:
        hidden, inner, eps = spec.hidden_size, spec.intermediate_size, spec.layer_norm_eps
        self._head_dim = hidden // spec.num_heads
        shards = [heads(shard, spec.num_heads, self._head_dim, context) for shard in "qkv"]
        self._num_heads = shards[0].length // self._head_dim
        self._activation = spec.activation
        self._is_rounded = context.rounds_products
        self.qkv = Linear.column_parallel(hidden, shards, True, context)
        self.attention_output = Linear.row_parallel(hidden, hidden, True, context)
        self.attention_norm = LayerNorm(hidden, eps, context)
        self.intermediate = Linear.column_parallel(
            hidden, [column("", inner, context)], True, context
        )
        self.output = Linear.row_parallel(inner, hidden, True, context)
        self.output_norm = LayerNorm(hidden, eps, context)

    def forward(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        """Compute the layer.

        Args:
            hidden: `[num_tokens, hidden_size]`, overwritten.
            batch: the texts of the step.

        Returns:
            A new tensor of the shape of `hidden`.
        """
        qkv = self.qkv.apply(hidden)
        heads = self._num_heads
        attended = encoder_attention(
            qkv,
            batch.lengths,
            heads,
            heads,
            self._head_dim**-0.5,
            is_rounded=self._is_rounded,
        )
        hidden = self.attention_norm.add_forward(self.attention_output.apply(attended), hidden)
        inner = self.intermediate.activated(hidden, self._activation)
        return self.output_norm.add_forward(self.output.apply(inner), hidden)

    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield the parts of the layer that own weights, with their names under `prefix`."""
        yield f"{prefix}.attention.qkv", self.qkv
        yield f"{prefix}.attention.output.dense", self.attention_output
        yield f"{prefix}.attention.output.LayerNorm", self.attention_norm
        yield f"{prefix}.intermediate.dense", self.intermediate
        yield f"{prefix}.output.dense", self.output
        yield f"{prefix}.output.LayerNorm", self.output_norm


class BertModel(TextEncoder):
    """A BERT encoder: embeddings, layers, and the head that gives vectors or scores."""

    spec: BertSpec

    def __init__(self, spec: BertSpec, context: BuildContext) -> None:
        self.spec, self.context = spec, context
        sizes = spec.vocab_size, spec.num_positions, spec.num_token_types
        self.words, self.positions, self.token_types = (
            Embedding(rows, spec.hidden_size, context, tied=False) for rows in sizes
        )
        self.norm = LayerNorm(spec.hidden_size, spec.layer_norm_eps, context)
        self.layers = [BertLayer(spec, context) for _ in range(spec.num_layers)]
        self.head = TextHead(spec.pooling, context)

    def forward(self, batch: EncoderBatch) -> Tensor:
        hidden = self.words.forward(batch.input_ids)
        hidden.add_(self._types(batch))
        hidden.add_(self.positions.forward(batch.positions + self.spec.first_position))
        hidden = self.norm.forward(hidden)
        for layer in self.layers:
            hidden = layer.forward(hidden, batch)
        return hidden

    def _types(self, batch: EncoderBatch) -> Tensor:
        """Return the token type embeddings. All tokens of a single text have the first type."""
        if batch.second_parts is None or self.spec.num_token_types < 2:
            return self.token_types.weight[0]
        return self.token_types.weight.index_select(0, batch.second_parts)

    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        yield "embeddings.word_embeddings", self.words
        yield "embeddings.position_embeddings", self.positions
        yield "embeddings.token_type_embeddings", self.token_types
        yield "embeddings.LayerNorm", self.norm
        for layer_idx, layer in enumerate(self.layers):
            yield from layer.holders(f"encoder.layer.{layer_idx}")
        yield from self.head.holders()
