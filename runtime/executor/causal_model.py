"""What the executor needs of a model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from runtime.models.forward_batch import ForwardBatch


class CausalModel(Protocol):
    """A decoder with a head; `runtime.models` holds the implementations."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states `[num_outputs, hidden_size]` of `batch.logits_indices`, normed."""
        ...

    def score(self, hidden: Tensor) -> Tensor:
        """Logits `[num_rows, vocab_size]` in the model's own dtype, contiguous."""
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits `[num_rows, vocab_size]` float32 of hidden states `[num_rows, hidden_size]`."""
        ...
