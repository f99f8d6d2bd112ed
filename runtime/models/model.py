"""The interface of a model of any family, for executor and loader."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from runtime.checkpoint.model_spec import ModelSpec
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.encoder_batch import EncoderBatch
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import WeightHolder
from runtime.models.layers.text_head import TextHead


class Model(ABC):
    """Layers with their weights.

    Attributes:
        spec: the model's sizes and other settings.
        context: the device and type with which it was built.
    """

    spec: ModelSpec
    context: BuildContext

    @abstractmethod
    def __init__(self, spec: Any, context: BuildContext) -> None:
        """Build the layers from the family's spec; matrices get memory when they are loaded."""

    @abstractmethod
    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        """Yield every owner of weights with its name, such as `model.layers.0.mlp.down_proj`."""


class CausalLM(Model):
    """A model that gives logits of the next token."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run all layers.

        Returns:
            `[num_outputs, hidden_size]` after the final norm, for `batch.logits_indices`. Before
            the last stage, a tensor that means nothing.
        """

    @abstractmethod
    def model_logits(self, hidden: Tensor) -> Tensor:
        """Return the vocabulary's logits in the model's own type.

        Args:
            hidden: `[num_samples, hidden_size]`, rows of what `forward` returned.

        Returns:
            `[num_samples, vocab_size]`, the model's dtype, contiguous.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the result of `model_logits` in float32."""
        return self.model_logits(hidden).float()


class TextEncoder(Model):
    """A model that gives a vector or scores for each text and keeps no state.

    Attributes:
        head: computes the vector or the scores of a text from its tokens' vectors.
        sees_backward_only: whether it is causal; if so it needs `EncoderBatch.attention`.
    """

    head: TextHead
    sees_backward_only: bool = False

    @property
    def shared_grain(self) -> int:
        """`EncoderBatch.shared` must be multiples of this many tokens; 0 if it must be absent."""
        return 0

    @abstractmethod
    def forward(self, batch: EncoderBatch) -> Tensor:
        """Run all layers.

        Returns:
            `[num_tokens, hidden_size]`.
        """

    def compute(self, batch: EncoderBatch) -> Tensor:
        """Return the model's output for each text, `[num_texts, output_size]` float32."""
        return self.head.run(self.forward(batch), batch)
