"""The part of a model's layers that a rank computes, if layers are cut into stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Stage:
    """Consecutive layers; the first stage also embeds tokens, the last one has norm and head.

    Attributes:
        index: number of this stage.
        count: number of stages.
        receive: fills a tensor with what the stage before sends, and returns it; needed after the
            first stage.
        send: sends a tensor to the stage after; needed before the last stage.
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
        """Indices of this stage's layers; if the cut is uneven, the first stages have one more."""
        size, more = divmod(num_layers, self.count)
        first = self.index * size + min(self.index, more)
        return range(first, first + size + (self.index < more))


ALL_LAYERS = Stage()
