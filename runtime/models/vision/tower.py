"""The interface of a vision tower: it maps pixels to vectors of the decoder's width."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.models.layers.build_context import BuildContext
from runtime.models.layers.parameter import WeightHolder


class Tower(ABC):
    """The layers that compute an image's vectors; each rank has the whole tower."""

    @abstractmethod
    def see(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Compute the vectors of several images in one pass.

        Args:
            images: `[3, height, width]` uint8 each, in sizes that the tower takes.

        Returns:
            For each image `[num_outputs, num_tokens, hidden_size]` in the model's dtype. The first
            output replaces the embeddings of the image's tokens. The decoder's first layers add the
            other outputs to the residual stream.
        """

    @abstractmethod
    def holders(self, prefix: str) -> Iterator[tuple[str, WeightHolder]]:
        """Yield each module that owns weights, with its name under `prefix`."""


class Normalize:
    """Scales and normalizes pixels for the first matrix product of a vision tower."""

    def __init__(self, spec: VisionSpec, context: BuildContext) -> None:
        """Copy the mean and the deviation of `spec` to the device."""
        self._factor = spec.rescale_factor
        self._mean, self._std = (
            torch.tensor(numbers, dtype=torch.float32, device=context.device).view(3, 1, 1)
            for numbers in (spec.mean, spec.std)
        )

    def run(self, pixels: Tensor) -> Tensor:
        """Map `[3, height, width]` uint8 to a new float32 tensor of that shape."""
        return pixels.float().mul_(self._factor).sub_(self._mean).div_(self._std)
