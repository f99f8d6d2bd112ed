"""Finds the size to which an image is scaled, and its number of tokens, as in `transformers`.

Source: `smart_resize` of Qwen2-VL's image processor.
"""

from __future__ import annotations

import math

from runtime.checkpoint.vision_spec import VisionSpec

# The most pixels of an image file, by its header. A phone's picture has 12 to 50 million.
MAX_PIXELS = 64 * 10**6
# The greatest ratio of longer to shorter side, if proportions are kept.
MAX_ASPECT_RATIO = 200


def scaled_size(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return height and width of the scaled image, as multiples of `factor`.

    Proportions are kept as far as multiples allow. Each side is at least one multiple.

    Args:
        height: height of the image, pixels.
        width: width of the image, pixels.
        factor: side of the square that becomes one token, pixels.
        min_pixels: fewest pixels of the result.
        max_pixels: most pixels of the result.
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
    """Return the number of tokens of a scaled image; 0 for an impossible size."""
    if vision.resizing == "square":
        return vision.num_tokens if height == width == vision.side else 0
    factor = vision.patch_size * vision.merge_size
    if height % factor or width % factor:
        return 0
    return (height // factor) * (width // factor)


def max_scaled_pixels(vision: VisionSpec) -> int:
    """Return an approximate upper bound on the number of pixels of a scaled image."""
    if vision.resizing == "square":
        return vision.side**2
    factor = vision.patch_size * vision.merge_size
    # A very long image is still one multiple high, even if it then has more than `max_pixels`.
    return min(max(vision.max_pixels, factor**2 * MAX_ASPECT_RATIO), MAX_PIXELS)
