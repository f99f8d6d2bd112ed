"""The size that an image is scaled to, and how many tokens it takes: as `transformers` counts.

Source: `smart_resize` of Qwen2-VL's image processor.
"""

from __future__ import annotations

import math

from runtime.checkpoint.vision_spec import VisionSpec

# Of a file, as its header says; a picture of a phone has 12 to 50 million.
MAX_PIXELS = 64 * 10**6
# Of longer side to shorter one, where proportions are kept.
MAX_ASPECT_RATIO = 200


def scaled_size(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width in multiples of `factor` whose product lies between two bounds.

    Proportions are kept as far as the multiples allow; a side is one multiple at least.

    Args:
        height: of the image, pixels.
        width: likewise.
        factor: pixels of the side of what becomes one token.
        min_pixels: of the result.
        max_pixels: likewise.
    """
    scaled = round(height / factor) * factor, round(width / factor) * factor
    if scaled[0] * scaled[1] > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if scaled[0] * scaled[1] < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return (
            math.ceil(height * grow / factor) * factor,
            math.ceil(width * grow / factor) * factor,
        )
    return scaled


def num_image_tokens(vision: VisionSpec, height: int, width: int) -> int:
    """Placeholder tokens of an image that is scaled already; 0 of a size that cannot be."""
    if vision.resizing == "square":
        return vision.num_tokens if height == width == vision.side else 0
    factor = vision.patch_size * vision.merge_size
    if height % factor or width % factor:
        return 0
    return (height // factor) * (width // factor)


def max_scaled_pixels(vision: VisionSpec) -> int:
    """About the most pixels of a scaled image."""
    if vision.resizing == "square":
        return vision.side**2
    factor = vision.patch_size * vision.merge_size
    # A long strip has one multiple in height, whatever the bound.
    return min(max(vision.max_pixels, factor**2 * MAX_ASPECT_RATIO), MAX_PIXELS)
