"""The loop over a decoder's layers, and the residual stream between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from runtime.models.forward_batch import ForwardBatch
from runtime.models.layers.norm import RMSNorm


class DecoderBlock(Protocol):
    """One layer in two halves: tokens see one another only in the first."""

    def attend(self, hidden: Tensor | None, residual: Tensor, batch: ForwardBatch) -> Tensor:
        """Run the first half.

        Args:
            hidden: `[num_tokens, hidden_size]`, the previous layer's output that `residual` still
                lacks; `None` for the first layer.
            residual: the stream, `[num_tokens, hidden_size]`, changed in place.
            batch: the step.

        Returns:
            `[num_tokens, width]`, what `finish` takes.
        """
        ...

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """Run the second half.

        Args:
            attended: `[n, width]`, rows of what `attend` returned.
            residual: these rows of the stream, `[n, hidden_size]`, changed in place.

        Returns:
            `[n, hidden_size]`, this layer's output that `residual` still lacks.
        """
        ...


def run_layers(
    layers: Sequence[DecoderBlock], norm: RMSNorm, residual: Tensor, batch: ForwardBatch
) -> Tensor:
    """Run all layers and the last norm.

    Args:
        layers: in order, at least one.
        norm: applied to the stream behind the last layer.
        residual: embeddings, `[num_tokens, hidden_size]`, changed in place.
        batch: the step.

    Returns:
        `[num_outputs, hidden_size]`, of `batch.logits_indices`: of the last layer, only these
        tokens pass its second half, since nothing reads more of the others than their keys.
    """
    hidden: Tensor | None = None
    wanted, deep = batch.logits_indices, batch.deep_vectors
    for index, layer in enumerate(layers if wanted is None else layers[:-1]):
        hidden = layer.finish(layer.attend(hidden, residual, batch), residual)
        if index < len(deep) and batch.images is not None:
            residual.index_add_(0, batch.images.places, deep[index])
    if wanted is not None:
        last = layers[-1]
        attended = last.attend(hidden, residual, batch).index_select(0, wanted)
        residual = residual.index_select(0, wanted)
        if not len(wanted):
            return residual
        hidden = last.finish(attended, residual)
    return add_normed(hidden, residual, norm)


def add_normed(hidden: Tensor | None, residual: Tensor, norm: RMSNorm | None) -> Tensor:
    """Add `hidden` to the stream in place and return the stream's norm.

    Args:
        hidden: `[num_tokens, hidden_size]`, what `residual` still lacks, if anything.
        residual: the stream, `[num_tokens, hidden_size]`.
        norm: `None` where the next block reads the stream as it is.
    """
    if norm is None:
        return residual if hidden is None else residual.add_(hidden)
    return norm.forward(residual) if hidden is None else norm.add_forward(hidden, residual)
