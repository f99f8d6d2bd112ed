"""The interface of a model, which families implement and which executor and loader use."""

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
    """A model of any family: its layers with their weights.

    Attributes:
        spec: the model's sizes and other settings.
        context: the device, the dtype and the other settings with which the model was built.
    """

    spec: ModelSpec
    context: BuildContext

    @abstractmethod
    def __init__(self, spec: Any, context: BuildContext) -> None:
        """Build the layers from the family's spec.

        Matrices get memory only when they are loaded.
        """

    @abstractmethod
    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name: `model.layers.0.mlp.down_proj`."""


class CausalLM(Model):
    """A model that gives logits of the next token.

    Attributes:
        is_recordable: whether `forward` has no branches that depend on the values of tensors, so
            that a decode step can be recorded (`runtime.executor.recorded_steps`). Models with
            experts have such branches on a CPU: Python chooses which experts are multiplied.
    """

    is_recordable: bool = False

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run all layers, or those of this rank's pipeline stage.

        Returns:
            `[num_outputs, hidden_size]` after the last norm, one row for each of
            `batch.logits_indices`. A stage before the last returns a tensor without meaning.
        """

    @abstractmethod
    def model_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the vocabulary in the model's dtype.

        Args:
            hidden: `[num_samples, hidden_size]`, rows of the result of `forward`.

        Returns:
            `[num_samples, vocab_size]`, contiguous.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the result of `model_logits` in float32."""
        return self.model_logits(hidden).float()


class TextEncoder(Model):
    """A model that gives a vector or scores for each text and keeps no state between steps.

    Attributes:
        head: computes the vector or the scores of a text from its tokens' vectors.
        sees_backward_only: whether a token attends only to earlier tokens and itself. Such a model
            needs `EncoderBatch.attention`.
    """

    head: TextHead
    sees_backward_only: bool = False

    @property
    def shared_grain(self) -> int:
        """The unit of shared beginnings: lengths in `EncoderBatch.shared` must be multiples of it.

        It is 0 if the model does not support `EncoderBatch.shared`.
        """
        return 0

    @abstractmethod
    def forward(self, batch: EncoderBatch) -> Tensor:
        """Run all layers.

        Returns:
            `[num_tokens, hidden_size]`, a vector for each token.
        """

    def compute(self, batch: EncoderBatch) -> Tensor:
        """Return the model's output for each text, `[num_texts, output_size]` float32."""
        return self.head.run(self.forward(batch), batch)
