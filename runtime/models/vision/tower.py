"""What a tower is: pixels of images in, vectors of the decoder's width out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import WeightHolder


class Tower(ABC):
    """The layers that see, whole on each rank."""

    @abstractmethod
    def see(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Compute images together.

        Args:
            images: `[3, height, width]` uint8 each, of sizes that the tower takes.

        Returns:
            For each `[num_outputs, num_tokens, hidden_size]`, the model's dtype: what stands at its
            tokens in the place of embeddings, then what the decoder's first layers add there.
        """

    @abstractmethod
    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield the owners of weights under `prefix`."""


class Normalize:
    """Bytes of pixels to what a tower's first product takes."""

    def __init__(self, spec: VisionSpec, context: BuildContext) -> None:
        """Keep the numbers that `spec` names on the device."""
        self._factor = spec.rescale_factor
        self._mean, self._std = (
            torch.tensor(numbers, dtype=torch.float32, device=context.device).view(3, 1, 1)
            for numbers in (spec.mean, spec.std)
        )

    def run(self, pixels: Tensor) -> Tensor:
        """Map `[3, height, width]` uint8 to float32 of that shape, a new tensor."""
        return pixels.float().mul_(self._factor).sub_(self._mean).div_(self._std)
