"""The head of an embedder or classifier: pooling of tokens, dense layers, normalization."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from runtime.checkpoint.sentence_transformers import HeadLayer, Mode, Pooling
from runtime.models.encoder_batch import EncoderBatch
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.linear import Linear
from runtime.models.layers.norm import LayerNorm
from runtime.models.layers.parameter import WeightHolder


def pool(hidden: Tensor, batch: EncoderBatch, mode: Mode) -> Tensor:
    """Return one vector for each text, made of its tokens' vectors.

    Args:
        hidden: `[num_tokens, hidden_size]`, vectors of all tokens of the batch.
        batch: the batch with the texts.
        mode: the first token's vector (`cls`), the last token's (`last`), or the mean.

    Returns:
        `[num_texts, hidden_size]` float32.
    """
    starts, ends = batch.indptr[:-1], batch.indptr[1:]
    skipped = batch.prompt_lens
    if mode == "cls":
        if skipped is not None:
            starts = torch.minimum(starts + starts.new_tensor(skipped), ends - 1)
        return hidden.index_select(0, starts).float()
    if mode == "last":
        return hidden.index_select(0, ends - 1).float()
    # Each text is averaged by itself, so that its sum does not depend on the other texts.
    parts = hidden.float().split(list(batch.lengths))
    if skipped is not None:
        # If a text was truncated within its instruction, its last token is used.
        parts = tuple(
            part[min(skip, len(part) - 1) :] for part, skip in zip(parts, skipped, strict=True)
        )
    return torch.stack([part.mean(dim=0) for part in parts])


class TextHead:
    """The head of a model that gives vectors or scores; each rank has the whole head."""

    def __init__(self, pooling: Pooling, context: BuildContext) -> None:
        self.pooling = pooling
        self._dtype = context.dtype
        self._layers = [_Dense(layer, context) for layer in pooling.layers]

    def run(self, hidden: Tensor, batch: EncoderBatch) -> Tensor:
        """Return the output for each text.

        Args:
            hidden: `[num_tokens, hidden_size]`, vectors of all tokens of the batch.
            batch: the batch with the texts.

        Returns:
            `[num_texts, output_size]` float32.
        """
        return self.finish(pool(hidden, batch, self.pooling.mode))

    def finish(self, pooled: Tensor) -> Tensor:
        """Map pooled vectors, `[num_texts, hidden_size]`, to `[num_texts, output_size]` float32."""
        pooled = self._through_layers(pooled)
        return functional.normalize(pooled, dim=-1) if self.pooling.normalize else pooled

    def of_tokens(self, hidden: Tensor) -> Tensor:
        """Return a vector of unit length for each token.

        Args:
            hidden: `[num_tokens, hidden_size]`.

        Returns:
            `[num_tokens, token_size]` float32.
        """
        if self.pooling.per_token:
            hidden = self._through_layers(hidden)
        return functional.normalize(hidden.float(), dim=-1)

    def _through_layers(self, vectors: Tensor) -> Tensor:
        if self._layers:
            vectors = vectors.to(self._dtype)
            for layer in self._layers:
                vectors = layer.forward(vectors)
        return vectors.float()

    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name in the weight map.

        See `runtime.checkpoint.model_spec.head_weights`.
        """
        for index, layer in enumerate(self._layers):
            yield f"head.{index}", layer.linear
            if layer.norm is not None:
                yield f"head.{index}_norm", layer.norm


class _Dense:
    """A dense layer of the head: product, activation and norm."""

    def __init__(self, layer: HeadLayer, context: BuildContext) -> None:
        sizes = layer.in_size, layer.out_size
        self.linear = Linear.replicated(*sizes, layer.bias, context)
        self.norm: LayerNorm | None = None
        if layer.norm:
            self.norm = LayerNorm(layer.out_size, layer.norm_eps, context, has_bias=layer.norm_bias)
        self._activation = layer.activation

    def forward(self, pooled: Tensor) -> Tensor:
        if self._activation:
            pooled = self.linear.activated(pooled, self._activation)
        else:
            pooled = self.linear.apply(pooled)
        return pooled if self.norm is None else self.norm.forward(pooled)
