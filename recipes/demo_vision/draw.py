"""Draws a scene as a picture and prepares it for the model."""

import io
import math
from functools import cache
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from recipes.demo_vision.scenes import Scene
from recipes.demo_vision.shapes import draw_shape

PATCH, MERGE = 14, 2
CELL = PATCH * MERGE
MIN_PIXELS, MAX_PIXELS = 16 * CELL * CELL, 64 * CELL * CELL
Pixels = NDArray[np.uint8]


@cache
def _font(size: int) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def _shapes(scene: Scene, pen: ImageDraw.ImageDraw, rng: Random) -> None:
    width, height = scene.size
    for thing in scene.things:
        radius = thing.radius * min(scene.size)
        line = max(2, round(radius * 0.16)) if thing.outline else 0
        centre = (thing.x * width, thing.y * height)
        draw_shape(pen, rng, thing.shape, centre, radius, thing.rgb, line)


def _text(scene: Scene, pen: ImageDraw.ImageDraw, rng: Random) -> None:
    width, height = scene.size
    probe = _font(100).getbbox(scene.text)
    wide, high = max(1.0, probe[2] - probe[0]), max(1.0, probe[3] - probe[1])
    largest = 100 * min(0.9 * width / wide, 0.85 * height / high)
    size = max(9, round(largest * rng.uniform(0.45 if len(scene.text) < 4 else 0.62, 1.0)))
    left, top, right, bottom = _font(size).getbbox(scene.text)
    x = rng.uniform(0.03 * width, max(0.03 * width, 0.97 * width - (right - left)))
    y = rng.uniform(0.03 * height, max(0.03 * height, 0.97 * height - (bottom - top)))
    pen.text((x - left, y - top), scene.text, fill=scene.text_colour[1], font=_font(size))


def _chart(scene: Scene, pen: ImageDraw.ImageDraw, rng: Random) -> None:
    width, height = scene.size
    left, right = width * rng.uniform(0.06, 0.14), width * rng.uniform(0.9, 0.97)
    labelled = bool(scene.bars[0].label)
    floor = height * (rng.uniform(0.82, 0.88) if labelled else rng.uniform(0.88, 0.96))
    ceiling = height * rng.uniform(0.06, 0.2)
    ink = rng.choice([(0, 0, 0), (60, 60, 60), (128, 128, 128)])
    step = (right - left) / len(scene.bars)
    bar = step * rng.uniform(0.5, 0.85)
    if rng.random() < 0.25:
        for part in (0.25, 0.5, 0.75, 1.0):
            y = floor - part * (floor - ceiling)
            pen.line((left, y, right, y), fill=(215, 215, 215))
    font = _font(max(9, round(min(height * 0.1, step * 0.8))))
    for index, one in enumerate(scene.bars):
        x = left + step * (index + 0.5)
        box = (x - bar / 2, floor - one.height * (floor - ceiling), x + bar / 2, floor)
        pen.rectangle(box, fill=one.rgb)
        if one.label:
            pen.text((x, floor + 2), one.label, fill=ink, font=font, anchor="mt")
    if rng.random() < 0.8:
        pen.line((left, floor, right, floor), fill=ink, width=rng.choice((1, 2)))
        if rng.random() < 0.7:
            pen.line((left, ceiling, left, floor), fill=ink, width=1)


def _other(scene: Scene, rng: Random) -> Image.Image:
    width, height = scene.size
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    if scene.kind == "noise":
        grey = rng.random() < 0.3
        grain = numbers.integers(0, 256, (height, width, 1 if grey else 3), np.uint8)
        return Image.fromarray(np.broadcast_to(grain, (height, width, 3)).copy())
    if scene.kind == "blobs":
        # The noise is as in a photo out of focus: few low frequencies around one colour.
        coarse = numbers.normal(0, rng.uniform(25, 80), (rng.randint(2, 6), rng.randint(2, 6), 3))
        coarse = coarse.mean(-1, keepdims=True) + 0.5 * coarse + np.array(scene.background[1])
        small = Image.fromarray(np.clip(coarse, 0, 255).astype(np.uint8))
        return small.resize(scene.size, Image.Resampling.BICUBIC)
    first, second = np.array(scene.background[1]), np.array(scene.text_colour[1])
    y, x = np.mgrid[0:height, 0:width] / np.array([height, width]).reshape(2, 1, 1)
    along = rng.random() < 0.5
    if scene.kind == "gradient":
        mix = x if along else y
    else:
        mix = np.floor((x if along else y) * rng.randint(4, 12)) % 2
        if rng.random() < 0.3:
            mix = np.abs(mix - np.floor((y if along else x) * rng.randint(4, 12)) % 2)
    mixed = first + (second - first) * mix[..., None]
    return Image.fromarray(mixed.astype(np.uint8))


def draw(scene: Scene) -> Image.Image:
    """The picture of a scene; deterministic."""
    rng = Random(scene.seed)
    # Half of them are drawn larger and scaled down, so that their edges are smooth.
    smooth = scene.kind in ("shapes", "chart") and max(scene.size) <= 260 and rng.random() < 0.4
    if scene.kind in ("noise", "blobs", "gradient", "stripes"):
        image = _other(scene, rng)
    else:
        size = scene.size
        if smooth:
            size = (2 * size[0], 2 * size[1])
            scene = _resized(scene, size)
        image = Image.new("RGB", size, scene.background[1])
        pen = ImageDraw.Draw(image)
        if scene.kind == "shapes":
            _shapes(scene, pen, rng)
        elif scene.kind == "text":
            _text(scene, pen, rng)
        elif scene.kind == "chart":
            _chart(scene, pen, rng)
        if smooth:
            image = image.reduce(2)
    return _worn(image, rng)


def _resized(scene: Scene, size: tuple[int, int]) -> Scene:
    values = {name: getattr(scene, name) for name in scene.__dataclass_fields__}
    return Scene(**{**values, "size": size})


def _worn(image: Image.Image, rng: Random) -> Image.Image:
    """Add defects of real pictures: JPEG artefacts, grain."""
    kind = rng.random()
    if kind < 0.15:
        kept = io.BytesIO()
        image.save(kept, "JPEG", quality=rng.randint(35, 95))
        image = Image.open(kept).convert("RGB")
    elif kind < 0.27:
        pixels = np.asarray(image).astype(np.int16)
        numbers = np.random.default_rng(rng.randrange(1 << 30))
        high = rng.randint(2, 14)
        pixels += numbers.integers(-high, high + 1, pixels.shape, np.int16)
        image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    return image


def scaled_size(width: int, height: int) -> tuple[int, int]:
    """Width and height in pixels to which the processor of Qwen2.5-VL scales a picture."""
    wide, high = round(width / CELL) * CELL, round(height / CELL) * CELL
    if wide * high > MAX_PIXELS:
        factor = math.sqrt(width * height / MAX_PIXELS)
        wide = max(CELL, math.floor(width / factor / CELL) * CELL)
        high = max(CELL, math.floor(height / factor / CELL) * CELL)
    elif wide * high < MIN_PIXELS:
        factor = math.sqrt(MIN_PIXELS / (width * height))
        wide = math.ceil(width * factor / CELL) * CELL
        high = math.ceil(height * factor / CELL) * CELL
    return wide, high


def prepare(image: Image.Image) -> Pixels:
    """The picture `[height, width, 3]` as the processor scales it."""
    size = scaled_size(*image.size)
    if size != image.size:
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image)


def patches(pixels: Pixels) -> Pixels:
    """Patches `[count, 14 * 14 * 3]` in the tower's order: a merged cell's patches are adjacent."""
    height, width, _ = pixels.shape
    cells = pixels.reshape(height // CELL, MERGE, PATCH, width // CELL, MERGE, PATCH * 3)
    return cells.transpose(0, 3, 1, 4, 2, 5).reshape(-1, PATCH * PATCH * 3)
