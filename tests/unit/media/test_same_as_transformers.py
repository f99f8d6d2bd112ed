"""Pixels and counts of tokens are those of the image processors of `transformers`."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from runtime.checkpoint.vision_spec import VisionSpec
from runtime.media.image_job import ImageJob
from runtime.media.image_process import scale
from runtime.media.image_size import num_image_tokens
from runtime.requests.image_input import PreparedImage
from tests.support.pictures import PATCHES, SQUARE, encoded, noise, normalised

SIZES = [(4, 4), (5, 9), (27, 29), (56, 56), (64, 64), (200, 4), (4, 800), (640, 480), (113, 300)]
SIZES += [(14, 28), (42, 42), (1000, 999), (31, 1023), (224, 224), (250, 140)]
# That a PNG keeps; of others see the formats below.
MODES = ["1", "L", "P", "LA", "RGB", "RGBA", "I;16"]


def prepare(content: bytes, vision: VisionSpec) -> PreparedImage:
    found = scale(
        ImageJob(
            is_base64=False,
            resizing=vision.resizing,
            factor=vision.patch_size * vision.merge_size,
            min_pixels=vision.min_pixels,
            max_pixels=vision.max_pixels,
            side=vision.side,
            resample=vision.resample,
        ),
        content,
    )
    assert not found.error, found.error
    num_tokens = num_image_tokens(vision, found.height, found.width)
    return PreparedImage(b"", (3, found.height, found.width), num_tokens, found.pixels)


def processor(vision: VisionSpec) -> Any:
    pytest.importorskip("transformers")
    if vision.resizing == "square":
        module = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
        return module.Gemma3ImageProcessorPil(
            size={"height": vision.side, "width": vision.side},
            image_mean=list(vision.mean),
            image_std=list(vision.std),
        )
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    return module.Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        size={"shortest_edge": vision.min_pixels, "longest_edge": vision.max_pixels},
    )


def as_picture(patches: Any, grid: Any, vision: VisionSpec) -> Any:
    """Qwen's rows of patches as `[3, height, width]`."""
    _, high, wide = map(int, grid)
    side, merge = vision.patch_size, vision.merge_size
    shape = (high // merge, wide // merge, merge, merge, 3, 2, side, side)
    picture = patches.reshape(shape)[:, :, :, :, :, 0].transpose(4, 0, 2, 5, 1, 3, 6)
    return picture.reshape(3, high * side, wide * side)


def assert_same(image: Any, content: bytes, vision: VisionSpec) -> None:
    ours = prepare(content, vision)
    theirs = processor(vision)(images=[image], return_tensors="np")
    if vision.resizing == "square":
        wanted, num_tokens = theirs["pixel_values"][0], vision.num_tokens
    else:
        grid = theirs["image_grid_thw"][0]
        wanted = as_picture(theirs["pixel_values"], grid, vision)
        num_tokens = int(grid.prod()) // vision.merge_size**2
    np.testing.assert_allclose(normalised(ours, vision), wanted, atol=1e-5, rtol=0)
    assert ours.num_tokens == num_tokens


VISIONS = pytest.mark.parametrize("vision", [PATCHES, SQUARE], ids=["patches", "square"])


@VISIONS
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_size_and_proportion(vision: VisionSpec, size: tuple[int, int]) -> None:
    image = noise(*size, seed=sum(size))
    assert_same(image, encoded(image), vision)


@VISIONS
@pytest.mark.parametrize("mode", MODES)
def test_every_mode(vision: VisionSpec, mode: str) -> None:
    content = encoded(noise(90, 60, mode))
    assert_same(Image.open(io.BytesIO(content)), content, vision)


@VISIONS
@pytest.mark.parametrize(
    ("kind", "mode", "options"),
    [
        ("JPEG", "RGB", {}),
        ("JPEG", "L", {"progressive": True}),
        ("JPEG", "CMYK", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("GIF", "P", {}),
        ("GIF", "P", {"transparency": 3}),
        ("PNG", "P", {"transparency": 5}),
        ("PNG", "RGB", {"transparency": (1, 2, 3)}),
    ],
)
def test_every_format(vision: VisionSpec, kind: str, mode: str, options: dict[str, Any]) -> None:
    content = encoded(noise(70, 50, mode), kind, **options)
    assert_same(Image.open(io.BytesIO(content)), content, vision)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_camera_s_orientation_turns_the_picture(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(noise(90, 40), "JPEG", exif=exif)
    assert_same(ImageOps.exif_transpose(Image.open(io.BytesIO(content))), content, PATCHES)


def test_the_first_picture_of_a_gif_is_taken() -> None:
    frames = [noise(40, 40, "P", seed) for seed in range(3)]
    content = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert_same(Image.open(io.BytesIO(content)), content, PATCHES)
