"""Computes the vectors of images with the image tower, and keeps them on the device.

A step's plan lists the images to compute and to drop. A hash, `digest`, identifies an image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.executor.staging import to_device
from runtime.models.attention.forward_batch import ImageTokens
from runtime.models.vision.model import SeeingDecoder
from runtime.models.vision.tower import Tower
from runtime.requests.image_input import PreparedImage
from runtime.step.step_plan import StepPlan

# Most pixels of the images that the tower processes together, as one pack.
PACK_PIXELS = 2**21
# On a GPU a pack's number of vectors is rounded up to a multiple of 64, or of 256 above 1024. The
# matrix library searches for an algorithm for each new number of rows, for up to a millisecond. On
# an H200, the first image of a size took the demo model's tower 11 ms, and the next one 3 ms.
_FINE_STEP, _FINE_MOST, _COARSE_STEP = 64, 1024, 256


class ImageStore:
    """The vectors of the images that steps read, on the device.

    Attributes:
        is_bidirectional: whether an image's tokens attend to one another in both directions.
    """

    def __init__(
        self,
        tower: Tower,
        vision: VisionSpec,
        device: torch.device,
        *,
        alone: bool = False,
        pads: bool | None = None,
    ) -> None:
        """Start without images.

        Args:
            tower: the layers that compute the vectors of images.
            vision: the form of the tower's input.
            device: where the tower is.
            alone: whether each image is computed separately.
            pads: whether packs are rounded up to a few sizes; `None` for yes on a GPU, no on a CPU.
        """
        self.is_bidirectional = vision.is_bidirectional
        self._tower = tower
        self._vision = vision
        self._pack_pixels = 0 if alone else PACK_PIXELS
        self._device = device
        self._pads = device.type == "cuda" if pads is None else pads
        self._vectors: dict[bytes, Tensor] = {}

    def update(self, plan: StepPlan) -> None:
        """Drop and compute the images that a step's plan lists."""
        for digest in plan.image_drops:
            self._vectors.pop(digest, None)
        for pack in packs(plan.image_loads, self._pack_pixels):
            pixels = [_pixels(image, self._device) for image in pack]
            if self._pads:
                pixels += self._padding(sum(image.num_tokens for image in pack))
            seen = self._tower.see(pixels)
            for image, vectors in zip(pack, seen[: len(pack)], strict=True):
                self._vectors[image.digest] = vectors

    def _padding(self, num_tokens: int) -> list[Tensor]:
        """Return a blank image that pads images of `num_tokens` tokens up to the next size.

        The list is empty if no padding is needed.
        """
        num_blank = self._padded_size(num_tokens) - num_tokens
        return [self._blank(num_blank)] if num_blank else []

    def _blank(self, num_tokens: int) -> Tensor:
        """Return a black image that has `num_tokens` vectors."""
        shape = (3, self._cell, num_tokens * self._cell)
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)

    @property
    def _cell(self) -> int:
        """Side in pixels of the square that one vector covers."""
        return self._vision.patch_size * self._vision.merge_size

    @property
    def _most_padded(self) -> int:
        """Number of vectors of the largest pack; only a single image may have more."""
        return max(PACK_PIXELS // self._cell**2, 1)

    def _padded_size(self, num_tokens: int) -> int:
        if self._vision.side:
            # All images have the same size, so they need no padding.
            return num_tokens
        step = _FINE_STEP if num_tokens <= _FINE_MOST else _COARSE_STEP
        return max(num_tokens, min(-(-num_tokens // step) * step, self._most_padded))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute a pack of each size, so that the first image of a size delays no stream."""
        side = self._vision.side
        if side:
            image = torch.zeros(3, side, side, dtype=torch.uint8, device=self._device)
            for count in range(1, max(1, self._pack_pixels // side**2) + 1):
                self._tower.see([image] * count)
            return
        for num_tokens in self.pack_sizes():
            self._tower.see([self._blank(num_tokens)])

    def pack_sizes(self) -> list[int]:
        """Return the sizes to which packs are rounded up, in vectors.

        A pack that is a single larger image is not rounded up.
        """
        most = self._most_padded
        return sorted({self._padded_size(each) for each in (*range(1, most, _FINE_STEP), most)})

    def tokens_of(self, plan: StepPlan, known: NDArray[np.intp]) -> ImageTokens:
        """Return the vectors of a step's image tokens.

        Args:
            plan: the step's plan, which has image spans.
            known: index in the step of each token of `plan.chunk_tokens`.
        """
        spans = plan.image_spans
        token_indices = [known[span.first : span.first + span.length] for span in spans]
        vectors = [
            self._vectors[span.digest][:, span.offset : span.offset + span.length] for span in spans
        ]
        (index,) = to_device(self._device, np.concatenate(token_indices).astype(np.int64))
        return ImageTokens(index, list(torch.cat(vectors, dim=1)))

    def clear(self) -> None:
        """Release the vectors of all images."""
        self._vectors.clear()


def packs(images: Sequence[PreparedImage], most_pixels: int) -> Iterator[list[PreparedImage]]:
    """Yield the images in packs of at most `most_pixels` pixels each.

    An image with more pixels is a pack of its own.
    """
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
    """Run the image tower on the input that needs the most memory: a pack of the largest images."""
    vision = model.spec.vision
    assert vision is not None, "it takes images"
    device, cell = model.context.device, vision.patch_size * vision.merge_size
    side = vision.side or max(1, math.isqrt(vision.max_pixels) // cell) * cell
    count = max(1, pack_pixels // side**2)
    pixels = torch.zeros(3, side, side, dtype=torch.uint8, device=device)
    model.visual.see([pixels] * count)


def _pixels(image: PreparedImage, device: torch.device) -> Tensor:
    # The bytes are copied, because torch does not wrap read-only bytes.
    values = np.frombuffer(bytearray(image.pixels), dtype=np.uint8).reshape(image.size)
    (pixels,) = to_device(device, values)
    return pixels
