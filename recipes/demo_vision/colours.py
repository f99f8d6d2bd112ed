"""Named colours: the shades drawn for a name, and the name of a seen colour."""

from random import Random

import numpy as np
from numpy.typing import NDArray

Rgb = tuple[int, int, int]

SAMPLES: dict[str, tuple[Rgb, ...]] = {
    "red": ((255, 0, 0), (220, 20, 30), (230, 40, 40), (200, 0, 0)),
    "green": ((0, 128, 0), (0, 170, 60), (40, 180, 60), (0, 255, 0), (60, 140, 50)),
    "blue": ((0, 0, 255), (30, 60, 220), (40, 90, 230), (0, 0, 190), (31, 119, 180)),
    "yellow": ((255, 255, 0), (250, 220, 40), (255, 235, 60)),
    "orange": ((255, 165, 0), (255, 140, 0), (245, 130, 30)),
    "purple": ((128, 0, 128), (140, 50, 190), (110, 40, 160)),
    "pink": ((255, 192, 203), (255, 130, 180), (255, 105, 180)),
    "brown": ((165, 42, 42), (139, 69, 19), (120, 70, 30), (101, 67, 33)),
    "black": ((0, 0, 0), (20, 20, 20)),
    "white": ((255, 255, 255), (245, 245, 245)),
    "gray": ((128, 128, 128), (150, 150, 150), (105, 105, 105), (169, 169, 169)),
    "cyan": ((0, 255, 255), (0, 200, 220), (64, 224, 208)),
}
NAMES = tuple(SAMPLES)
_ALL = np.array([rgb for rgbs in SAMPLES.values() for rgb in rgbs], np.float32)
_NAME_OF = np.array([index for index, name in enumerate(SAMPLES) for _ in SAMPLES[name]])
JITTER = 12


def shade(rng: Random, name: str) -> Rgb:
    """A shade of the colour `name`; sometimes the exact one that drawing libraries call so."""
    red, green, blue = rng.choice(SAMPLES[name])
    if rng.random() < 0.4:
        return red, green, blue
    return _near(rng, red), _near(rng, green), _near(rng, blue)


def _near(rng: Random, value: int) -> int:
    return min(255, max(0, value + rng.randint(-JITTER, JITTER)))


def distance(one: Rgb, other: Rgb) -> int:
    """Sum of the absolute differences of the channels."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def contrasting(rng: Random, background: Rgb, names: list[str]) -> tuple[str, Rgb] | None:
    """One of `names`, with a shade that stands out from `background`; None if none does."""
    for name in rng.sample(names, len(names)):
        rgb = shade(rng, name)
        if distance(rgb, background) > 110:
            return name, rgb
    return None


def shares(pixels: NDArray[np.uint8]) -> dict[str, float]:
    """The share of `[rows, columns, 3]` pixels of each colour name, the largest first."""
    flat = pixels.reshape(-1, 3).astype(np.float32)
    nearest = _NAME_OF[((flat[:, None] - _ALL[None]) ** 2).sum(-1).argmin(1)]
    counts = np.bincount(nearest, minlength=len(NAMES)) / len(flat)
    order = np.argsort(-counts, kind="stable")
    return {NAMES[index]: float(counts[index]) for index in order if counts[index] > 0}
