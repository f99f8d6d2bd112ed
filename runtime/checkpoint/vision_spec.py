"""The facts about a model's images that the front needs to prepare them. Front-safe: no torch.

The tower's own settings are in the family's class that derives from `VisionSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# How an image's size is chosen: `patches` keeps its proportions in multiples of a patch between two
# numbers of pixels (Qwen-VL), `square` scales it to one size (SigLIP).
Resizing = Literal["patches", "square"]


@dataclass(frozen=True, kw_only=True)
class VisionSpec:
    """How a prompt represents an image, and how its pixels are prepared.

    Attributes:
        image_token_id: the placeholder that is repeated once for each of an image's vectors.
        placeholder: the text that stands for an image in a prompt or chat template, such as
            `<|vision_start|><|image_pad|><|vision_end|>` or `<start_of_image>`.
        expansion: replaces `marker` in the text before tokenization; it holds `image_token` once,
            which is then repeated among the ids.
        marker: the part of `placeholder` that stands for one image, such as `<|image_pad|>`.
        image_token: the text of `image_token_id`.
        resizing: how the size is chosen.
        patch_size: pixels of a patch's side.
        merge_size: patches of a side that the tower joins into one vector.
        min_pixels, max_pixels: bounds of `height * width` under `patches`.
        side: pixels of a side under `square`; otherwise 0.
        num_tokens: vectors of an image under `square`; 0 if they follow from the size.
        resample: Pillow's number of the filter, as `preprocessor_config.json` writes it.
        rescale_factor: multiplies the bytes, in float32.
        mean, std: a number for each channel; the mean is subtracted, then the result is divided by
            std.
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
        """Placeholders of the largest image."""
        return self.num_tokens or self.max_pixels // (self.patch_size * self.merge_size) ** 2
