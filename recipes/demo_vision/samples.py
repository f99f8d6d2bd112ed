"""Training rows: pictures with questions, two pictures, and chats without any."""

from collections.abc import Iterator
from random import Random

from recipes.demo_model.phrasing import system_prompt
from recipes.demo_vision.draw import draw, prepare
from recipes.demo_vision.pairs import about_two
from recipes.demo_vision.questions import Asked, about
from recipes.demo_vision.rows import SYSTEM, Row, RowWriter
from recipes.demo_vision.scenes import Scene, random_scene, shapes_scene
from recipes.demo_vision.talk import not_known, without_image

_MOST = 12
"""More questions than a row holds."""


def _system(rng: Random) -> str | None:
    kind = rng.random()
    return SYSTEM if kind < 0.8 else None if kind < 0.9 else system_prompt(rng)


def _distinct(stream: Iterator[Asked], most: int) -> list[Asked]:
    found: dict[str, Asked] = {}
    for _ in range(3 * most):
        asked = next(stream)
        found.setdefault(asked.question, asked)
        if len(found) == most:
            break
    return list(found.values())


def one_picture(rng: Random, writer: RowWriter, row: Row) -> None:
    """A picture with questions, or a chat without one."""
    if rng.random() < 0.03:
        talk = [without_image(rng) for _ in range(_MOST)]
        writer.write(row, [], talk, system=_system(rng), chained=rng.random() < 0.2)
        return
    scene = random_scene(rng)
    pixels = prepare(draw(scene))
    asked = _distinct(about(rng, scene, pixels), _MOST)
    if rng.random() < 0.05:
        asked.insert(rng.randrange(3), not_known(rng))
    mode = rng.random()
    writer.write(
        row, [pixels], asked, system=_system(rng), image_last=mode < 0.04, chained=mode > 0.9
    )


def two_pictures(rng: Random, writer: RowWriter, row: Row) -> None:
    """Two pictures with questions about both."""
    first = _scene_of_two(rng)
    second = first if rng.random() < 0.06 else _scene_of_two(rng)
    scenes = (first, second)
    pixels = (prepare(draw(first)), prepare(draw(second)))
    asked = _distinct(about_two(rng, scenes, pixels), _MOST)
    writer.write(row, pixels, asked, system=_system(rng), image_last=rng.random() < 0.04)


def _scene_of_two(rng: Random) -> Scene:
    scene = random_scene(rng, small=True)
    return shapes_scene(rng, scene.size) if rng.random() < 0.5 else scene
