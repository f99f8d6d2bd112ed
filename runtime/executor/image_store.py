"""Vectors of images on the device, by digest: a step says which are computed and which stay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.staging import to_device
from runtime.executor.step_plan import StepPlan
from runtime.models.forward_batch import ImageTokens
from runtime.models.vision.model import SeeingDecoder
from runtime.models.vision.tower import Tower
from runtime.requests.image_input import PreparedImage

# Pixels of the images that the tower takes together.
PACK_PIXELS = 2**21


class ImageStore:
    """What the tower made of the images that steps read.

    Attributes:
        is_bidirectional: see `VisionSpec`.
    """

    def __init__(
        self, tower: Tower, device: torch.device, *, is_bidirectional: bool, alone: bool = False
    ) -> None:
        """Hold nothing yet; `alone` has the tower compute each image by itself."""
        self.is_bidirectional = is_bidirectional
        self._tower = tower
        self._pack_pixels = 0 if alone else PACK_PIXELS
        self._device = device
        self._vectors: dict[bytes, Tensor] = {}

    def update(self, plan: StepPlan) -> None:
        """Drop and compute what a step says."""
        for digest in plan.image_drops:
            self._vectors.pop(digest, None)
        for pack in packs(plan.image_loads, self._pack_pixels):
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


def packs(images: Sequence[PreparedImage], most_pixels: int) -> Iterator[list[PreparedImage]]:
    """Share images out among runs of the tower; one that has more pixels runs alone."""
    pack: list[PreparedImage] = []
    total = 0
    for image in images:
        _, height, width = image.size
        if pack and total + height * width > most_pixels:
            yield pack
            pack, total = [], 0
        pack.append(image)
        total += height * width
    if pack:
        yield pack


@torch.inference_mode()
def see_the_largest(model: SeeingDecoder, pack_pixels: int = PACK_PIXELS) -> None:
    """Have the tower compute what takes the most memory: a full pack of the largest images."""
    vision = model.spec.vision
    assert vision is not None, "it takes images"
    device, cell = model.context.device, vision.patch_size * vision.merge_size
    side = vision.side or max(1, math.isqrt(vision.max_pixels) // cell) * cell
    count = max(1, pack_pixels // side**2)
    pixels = torch.zeros(3, side, side, dtype=torch.uint8, device=device)
    model.visual.see([pixels] * count)


def _pixels(image: PreparedImage, device: torch.device) -> Tensor:
    # A copy: torch takes no view of bytes that cannot be written.
    values = np.frombuffer(bytearray(image.pixels), dtype=np.uint8).reshape(image.size)
    (pixels,) = to_device(device, values)
    return pixels
