"""The interface of a tower: pixels of images in, vectors of the decoder's width out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import WeightHolder


class Tower(ABC):
    """The layers that compute images; each rank has the whole tower."""

    @abstractmethod
    def see(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Compute the vectors of several images in one pass.

        Args:
            images: `[3, height, width]` uint8 each, in sizes that the tower takes.

        Returns:
            For each image `[num_outputs, num_tokens, hidden_size]` in the model's dtype: first the
        vectors that replace its tokens' embeddings, then those that the decoder's first layers add.
        """

    @abstractmethod
    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield the owners of weights under `prefix`."""


class Normalize:
    """Maps bytes of pixels to the input of a tower's first product."""

    def __init__(self, spec: VisionSpec, context: BuildContext) -> None:
        """Keep the numbers of `spec` on the device."""
        self._factor = spec.rescale_factor
        self._mean, self._std = (
            torch.tensor(numbers, dtype=torch.float32, device=context.device).view(3, 1, 1)
            for numbers in (spec.mean, spec.std)
        )

    def run(self, pixels: Tensor) -> Tensor:
        """Map `[3, height, width]` uint8 to float32 of that shape, a new tensor."""
        return pixels.float().mul_(self._factor).sub_(self._mean).div_(self._std)
