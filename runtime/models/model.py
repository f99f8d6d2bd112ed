"""What executor and loader may ask of a model of any family."""

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
        spec: the model's numbers.
        context: where and in what type it was built.
    """

    spec: ModelSpec
    context: BuildContext

    @abstractmethod
    def __init__(self, spec: Any, context: BuildContext) -> None:
        """Build the layers from the family's own spec; matrices get memory when they are loaded."""

    @abstractmethod
    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        """Yield every owner of weights with its name, such as `model.layers.0.mlp.down_proj`."""


class CausalLM(Model):
    """A model that gives logits of the next token."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run all layers.

        Returns:
            `[num_outputs, hidden_size]`, the final norm applied: of `batch.logits_indices`.
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
        """Return what `model_logits` does, in float32."""
        return self.model_logits(hidden).float()


class TextEncoder(Model):
    """A model that gives numbers for each text, a vector or scores, and keeps nothing.

    Attributes:
        head: what makes them of the tokens' vectors.
        sees_backward_only: whether a token sees none behind it; needs `EncoderBatch.attention`.
    """

    head: TextHead
    sees_backward_only: bool = False

    @property
    def shared_grain(self) -> int:
        """Tokens at a time of which `compute` takes `EncoderBatch.shared`; 0 for whole texts."""
        return 0

    @abstractmethod
    def forward(self, batch: EncoderBatch) -> Tensor:
        """Run all layers.

        Returns:
            `[num_tokens, hidden_size]`.
        """

    def compute(self, batch: EncoderBatch) -> Tensor:
        """Return what the model gives for each text, `[num_texts, output_size]` float32."""
        return self.head.run(self.forward(batch), batch)
