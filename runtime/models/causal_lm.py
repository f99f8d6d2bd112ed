"""What the executor and the loader may ask of a decoder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from runtime.checkpoint.model_config import ModelConfig
from runtime.models.forward_batch import ForwardBatch
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import WeightHolder


class CausalLM(ABC):
    """A decoder with a language-model head.

    Attributes:
        config: the checkpoint's shape and numbers.
        context: where and in what type it was built.
    """

    config: ModelConfig
    context: BuildContext

    @abstractmethod
    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        """Build the layers; matrices get memory when they are loaded."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run all layers.

        Returns:
            `[num_outputs, hidden_size]`, the final norm applied: of `batch.logits_indices`.
        """

    @abstractmethod
    def score(self, hidden: Tensor) -> Tensor:
        """Score the vocabulary.

        Args:
            hidden: `[num_samples, hidden_size]`, rows of what `forward` returned.

        Returns:
            `[num_samples, vocab_size]`, the model's dtype, contiguous.
        """

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return what `score` does, in float32."""
        return self.score(hidden).float()

    @abstractmethod
    def holders(self) -> Iterator[tuple[str, WeightHolder]]:
        """Yield every owner of weights with its name, such as `model.layers.0.mlp.down_proj`."""
