"""Vectors of images on the device, by digest: a step says which are computed and which stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.staging import to_device
from runtime.executor.step_plan import StepPlan
from runtime.models.forward_batch import ImageTokens
from runtime.models.vision.tower import Tower
from runtime.requests.image_input import PreparedImage

# The tower takes images together up to this; a larger one alone.
PACK_PIXELS = 2**21


class ImageStore:
    """What the tower made of the images that steps read."""

    def __init__(self, tower: Tower, device: torch.device) -> None:
        """Hold nothing yet."""
        self._tower = tower
        self._device = device
        self._vectors: dict[bytes, Tensor] = {}

    def update(self, plan: StepPlan) -> None:
        """Drop and compute what a step says."""
        for digest in plan.image_drops:
            self._vectors.pop(digest, None)
        for pack in packs(plan.image_loads):
            seen = self._tower.see([_pixels(image, self._device) for image in pack])
            for image, vectors in zip(pack, seen, strict=True):
                self._vectors[image.digest] = vectors

    def tokens_of(self, plan: StepPlan, known: NDArray[np.intp]) -> ImageTokens:
        """Return the tokens of a step that stand for images, and their vectors.

        Args:
            plan: the step, which has some.
            known: place in the step of each of `plan.chunk_tokens`.
        """
        spans = plan.image_spans
        places = [known[span.first : span.first + span.length] for span in spans]
        vectors = [
            self._vectors[span.digest][:, span.offset : span.offset + span.length] for span in spans
        ]
        (index,) = to_device(self._device, np.concatenate(places).astype(np.int64))
        return ImageTokens(index, list(torch.cat(vectors, dim=1)))

    def clear(self) -> None:
        """Give all memory back."""
        self._vectors.clear()


def packs(images: Sequence[PreparedImage]) -> Iterator[list[PreparedImage]]:
    """Share images out among runs of the tower."""
    pack: list[PreparedImage] = []
    total = 0
    for image in images:
        _, height, width = image.size
        if pack and total + height * width > PACK_PIXELS:
            yield pack
            pack, total = [], 0
        pack.append(image)
        total += height * width
    if pack:
        yield pack


def _pixels(image: PreparedImage, device: torch.device) -> Tensor:
    # A copy: torch takes no view of bytes that cannot be written.
    values = np.frombuffer(bytearray(image.pixels), dtype=np.uint8).reshape(image.size)
    (pixels,) = to_device(device, values)
    return pixels
