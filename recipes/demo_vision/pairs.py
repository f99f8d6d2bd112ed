"""Questions about two pictures."""

from collections.abc import Iterator
from random import Random

from recipes.demo_vision.draw import Pixels
from recipes.demo_vision.phrases import ask
from recipes.demo_vision.questions import Asked, full, summary
from recipes.demo_vision.scenes import Scene
from recipes.demo_vision.shapes import with_article


def about_two(
    rng: Random,
    scenes: tuple[Scene, Scene],
    pixels: tuple[Pixels, Pixels],
    *,
    held_out: bool = False,
) -> Iterator[Asked]:
    """An endless stream of questions about two pictures."""
    said = [summary(scene, seen) for scene, seen in zip(scenes, pixels, strict=True)]
    shapes = all(scene.kind == "shapes" for scene in scenes)
    while True:
        kind = rng.random()
        which = rng.randrange(2)
        word = ("first", "second")[which]
        if kind < 0.36:
            question = ask(rng, f"in {word}", held_out=held_out)
            yield Asked("one of two", question, full(scenes[which], pixels[which]))
        elif kind < 0.55:
            question = ask(rng, "in both", held_out=held_out)
            answer = f"The first image shows {said[0]}. The second image shows {said[1]}."
            yield Asked("both", question, answer)
        elif kind < 0.62:
            same = said[0] == said[1]
            question = ask(rng, "same", held_out=held_out)
            yield Asked("same", question, "Yes, both show the same." if same else (
                "No, they show different things."))  # fmt: skip
        elif shapes:
            yield _of_shapes(rng, scenes, which, held_out)


def _of_shapes(rng: Random, scenes: tuple[Scene, Scene], which: int, held_out: bool) -> Asked:
    word = ("first", "second")[which]
    counts = [len(scene.things) for scene in scenes]
    kind = rng.random()
    if kind < 0.3:
        question = ask(rng, "count in", held_out=held_out, w=word)
        number = counts[which]
        shapes = "1 shape" if number == 1 else f"{number} shapes"
        return Asked("count in one", question, f"The {word} image has {shapes}.")
    if kind < 0.55:
        question = ask(rng, "which more", held_out=held_out)
        if counts[0] == counts[1]:
            return Asked("more", question, f"Both images have {counts[0]}.")
        more = "first" if counts[0] > counts[1] else "second"
        return Asked("more", question, f"The {more} image has more shapes.")
    thing = rng.choice(scenes[which].things)
    name = thing.shape if rng.random() < 0.6 else thing.words
    has = [any(name in (t.shape, t.words) for t in scene.things) for scene in scenes]
    question = ask(rng, "which has", held_out=held_out, x=with_article(name))
    words = "Both images have" if all(has) else f"The {word} image has"
    return Asked("which one", question, f"{words} {with_article(name)}.")
