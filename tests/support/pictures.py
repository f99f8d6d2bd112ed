"""Pictures for tests: as files, in base64, and as inputs of small models."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.requests.image_input import PreparedImage

PATCHES = VisionSpec(
    image_token_id=9,
    placeholder="<|vision_start|><|image_pad|><|vision_end|>",
    marker="<|image_pad|>",
    expansion="<|image_pad|>",
    image_token="<|image_pad|>",
    resizing="patches",
    patch_size=14,
    merge_size=2,
    min_pixels=56 * 56,
    max_pixels=28 * 28 * 64,
    resample=3,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)
SQUARE = replace(
    PATCHES,
    placeholder="<start_of_image>",
    marker="<start_of_image>",
    expansion="\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    image_token="<image_soft_token>",
    resizing="square",
    min_pixels=0,
    max_pixels=0,
    merge_size=4,
    side=112,
    num_tokens=4,
    resample=2,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


def noise(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Any:
    """Return a picture of random pixels in one of Pillow's modes."""
    grain = np.random.default_rng(seed).integers(0, 256, (height, width, 4), np.uint8)
    if mode == "I;16":
        return Image.fromarray(grain[..., :2].copy().view("<u2")[..., 0])
    if mode in ("RGBA", "LA", "PA"):
        return Image.fromarray(grain, "RGBA").convert(mode)
    return Image.fromarray(grain[..., :3].copy()).convert(mode)


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """Return a picture as a file's bytes."""
    target = io.BytesIO()
    image.save(target, kind, **options)
    return target.getvalue()


def base64_of(content: bytes) -> str:
    """Return a file's bytes in base64, as in requests."""
    return base64.b64encode(content).decode()


def data_url(content: bytes, kind: str = "image/png") -> str:
    """Return a file's bytes as a data URL, as OpenAI's clients send them."""
    return f"data:{kind};base64,{base64_of(content)}"


def normalised(image: PreparedImage, vision: VisionSpec) -> Any:
    """Return an image's pixels as a model reads them, normalized, float32 `[3, height, width]`."""
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.size).astype(np.float32)
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (vision.mean, vision.std))
    return (pixels * np.float32(vision.rescale_factor) - mean) / std
