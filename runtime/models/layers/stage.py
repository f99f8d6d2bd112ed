"""The pipeline stage of a rank: the layers that the rank computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Stage:
    """A pipeline stage: consecutive layers of the model.

    The first stage also embeds tokens. The last stage also has the last norm and the head.

    Attributes:
        index: number of this stage, from 0.
        count: number of stages.
        receive: fills a tensor with the data that the previous stage sent, and returns the tensor.
            Every stage except the first needs it.
        send: sends a tensor to the next stage. Every stage except the last needs it.
    """

    index: int = 0
    count: int = 1
    receive: Callable[[Tensor], Tensor] | None = None
    send: Callable[[Tensor], None] | None = None

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage gives logits."""
        return self.index == self.count - 1

    def layers(self, num_layers: int) -> range:
        """Return the indices of this stage's layers.

        If the stages cannot be of equal size, the first ones have one layer more.
        """
        size, more = divmod(num_layers, self.count)
        first = self.index * size + min(self.index, more)
        return range(first, first + size + (self.index < more))


ALL_LAYERS = Stage()
