"""Outlines of the shapes in the pictures."""

import math
from random import Random

from PIL import ImageDraw

from recipes.demo_vision.colours import Rgb

SHAPES = (
    "circle", "square", "triangle", "star", "rectangle", "oval", "diamond", "hexagon", "heart",
    "cross",
)  # fmt: skip
_ROUND = ("circle", "oval")
Points = list[tuple[float, float]]


def plural(shape: str) -> str:
    """The plural of a shape's name."""
    return shape + ("es" if shape == "cross" else "s")


def with_article(words: str) -> str:
    """`a` or `an` before `words`."""
    return ("an " if words[0] in "aeiou" else "a ") + words


def _regular(corners: int, start: float) -> Points:
    step = 2 * math.pi / corners
    return [(math.cos(start + i * step), math.sin(start + i * step)) for i in range(corners)]


def _star() -> Points:
    points = []
    for index in range(10):
        radius = 1.1 if index % 2 == 0 else 0.45
        angle = -math.pi / 2 + index * math.pi / 5
        points.append((radius * math.cos(angle), radius * math.sin(angle)))
    return points


def _heart() -> Points:
    points = []
    for index in range(28):
        t = 2 * math.pi * index / 28
        x = 16 * math.sin(t) ** 3
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x / 16, -y / 15))
    return points


def _cross() -> Points:
    a, b = 0.32, 1.0
    return [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a), (a, b), (-a, b), (-a, a), (-b, a),
            (-b, -a), (-a, -a)]  # fmt: skip


_UNIT: dict[str, Points] = {
    "square": [(-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)],
    "triangle": [(x * 1.12, y * 1.12 + 0.12) for x, y in _regular(3, -math.pi / 2)],
    "star": _star(),
    "rectangle": [(-1.05, -0.55), (1.05, -0.55), (1.05, 0.55), (-1.05, 0.55)],
    "diamond": [(0, -1.1), (0.75, 0), (0, 1.1), (-0.75, 0)],
    "hexagon": _regular(6, 0.0),
    "heart": _heart(),
    "cross": _cross(),
}
# How far a shape may be rotated and still have its name.
_TURN = {"triangle": 0.3, "star": 0.4, "hexagon": 0.6, "cross": 0.15, "heart": 0.2, "diamond": 0.08,
         "square": 0.15, "rectangle": 0.15}  # fmt: skip


def draw_shape(
    pen: ImageDraw.ImageDraw,
    rng: Random,
    shape: str,
    centre: tuple[float, float],
    radius: float,
    rgb: Rgb,
    line: int,
) -> None:
    """Draw one shape, filled, or only its outline.

    Args:
        pen: draws on the picture.
        rng: for the rotation.
        shape: one of `SHAPES`.
        centre: x and y in pixels.
        radius: about half its width, pixels.
        rgb: its colour.
        line: width of the outline in pixels; 0 fills it.
    """
    x, y = centre
    fill = None if line else rgb
    if shape in _ROUND:
        wide = high = radius
        if shape == "oval":
            upright = rng.random() < 0.3
            wide, high = (radius * 0.55, radius * 1.1) if upright else (radius * 1.1, radius * 0.55)
        pen.ellipse((x - wide, y - high, x + wide, y + high), fill, rgb, line or 1)
        return
    turn = 0.0 if rng.random() < 0.6 else rng.uniform(-1, 1) * _TURN[shape]
    if (shape == "rectangle" and rng.random() < 0.35) or (
        shape == "triangle" and rng.random() < 0.1
    ):
        turn += math.pi / 2 if shape == "rectangle" else math.pi
    cos, sin = math.cos(turn) * radius, math.sin(turn) * radius
    points = [(x + px * cos - py * sin, y + px * sin + py * cos) for px, py in _UNIT[shape]]
    pen.polygon(points, fill, rgb, line or 1)
