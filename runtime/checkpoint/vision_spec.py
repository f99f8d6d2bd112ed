"""Describes how a model takes images, as far as the front process prepares them. No torch.

Settings of the tower itself are in the family's class, which derives from `VisionSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How an image is resized. `patches` keeps its proportions, in multiples of a patch, between two
# numbers of pixels (Qwen-VL). `square` scales every image to one size (SigLIP).
Resizing = Literal["patches", "square"]


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """How a prompt represents an image, and how the image's pixels are prepared.

    Attributes:
        image_token_id: id of the placeholder token, which is repeated once for each image vector.
        placeholder: the text that stands for an image in a prompt or chat template, such as
            `<|vision_start|><|image_pad|><|vision_end|>` or `<start_of_image>`.
        marker: the part of `placeholder` that occurs once for each image, such as
            `<|image_pad|>`.
        expansion: the text that replaces `marker` before tokenization. It has `image_token` once;
            that token is repeated later, among the ids.
        image_token: the text of `image_token_id`.
        resizing: how images are resized.
        patch_size: side of a patch, pixels.
        merge_size: number of patches along a side that the tower joins to one vector.
        min_pixels, max_pixels: bounds on the resized image's pixels, with `patches`.
        side: side of the resized image, pixels, with `square`; otherwise 0.
        num_tokens: vectors of an image, with `square`; 0 if they follow from the image's size.
        resample: Pillow's number of the filter, as `preprocessor_config.json` writes it.
        rescale_factor: factor by which the bytes of pixels are multiplied, in float32.
        mean, std: a number for each channel: the mean is subtracted, then the result is divided by
            `std`.
        num_outputs: vectors of the decoder's width that the tower gives for each placeholder.
        is_bidirectional: whether the tokens of an image attend to one another in both directions.
    """

    image_token_id: int
    placeholder: str
    marker: str
    expansion: str
    image_token: str
    resizing: Resizing
    patch_size: int
    merge_size: int
    min_pixels: int = 0
    max_pixels: int = 0
    side: int = 0
    num_tokens: int = 0
    resample: int
    rescale_factor: float = 1 / 255
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    num_outputs: int = 1
    is_bidirectional: bool = False

    @property
    def max_tokens(self) -> int:
        """Maximum number of placeholder tokens of one image."""
        return self.num_tokens or self.max_pixels // (self.patch_size * self.merge_size) ** 2
