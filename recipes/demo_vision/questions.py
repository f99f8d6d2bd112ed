"""Questions about one picture, with their true answers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from recipes.demo_vision.colours import NAMES, shares
from recipes.demo_vision.draw import Pixels
from recipes.demo_vision.phrases import ONE_WORD, ask
from recipes.demo_vision.scenes import Scene, Thing
from recipes.demo_vision.shapes import SHAPES, plural, with_article

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")


@dataclass(frozen=True)
class Asked:
    """A question with its answer.

    Attributes:
        kind: its kind in the score.
        question, answer: the texts of user and assistant.
    """

    kind: str
    question: str
    answer: str


Maker = Callable[[Random, Scene, bool], Asked | None]


def _short(
    rng: Random, held_out: bool, kind: str, question: str, answers: tuple[str, str]
) -> Asked:
    """The full answer or, if a single word is requested, that word."""
    if not held_out and rng.random() < 0.12:
        return Asked(kind + ", one word", question + rng.choice(ONE_WORD), answers[1])
    return Asked(kind, question, answers[0])


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def summary(scene: Scene, pixels: Pixels) -> str:
    """Describe the picture by a noun phrase: `a red circle and 2 blue squares`."""
    if scene.kind == "shapes":
        parts = []
        for (colour, shape), things in scene.groups.items():
            several = f"{len(things)} {colour} {plural(shape)}"
            parts.append(with_article(f"{colour} {shape}") if len(things) == 1 else several)
        return _list(parts)
    if scene.kind == "text":
        return f"{_text_kind(scene.text)} {_quoted(scene.text)}"
    if scene.kind == "chart":
        return f"a bar chart with {len(scene.bars)} bars"
    if scene.kind == "noise":
        return "only noise, no shape that I know"
    if scene.kind == "plain":
        return f"nothing, the picture is all {scene.colours[0]}"
    if scene.kind == "stripes":
        names = " and ".join(sorted(scene.colours))
        return f"no shape that I know, only a pattern of {names}"
    if scene.kind == "gradient":
        return f"no shape that I know, only a gradient from {' to '.join(scene.colours)}"
    seen = [name for name, share in shares(pixels[::8, ::8]).items() if share >= 0.25][:2]
    return f"no shape that I know, only soft colours, mostly {' and '.join(seen) or 'mixed'}"


def _quoted(text: str) -> str:
    return text if text.isdigit() or len(text) == 1 else f'"{text}"'


def _text_kind(text: str) -> str:
    if text.isdigit():
        return "the digit" if len(text) == 1 else "the number"
    return "the letter" if len(text) == 1 else "the word"


def full(scene: Scene, pixels: Pixels) -> str:
    """The answer to `What is in the image?`."""
    verb = (
        "I see"
        if scene.kind in ("noise", "plain", "stripes", "gradient", "blobs")
        else ("The image shows")
    )
    return f"{verb} {summary(scene, pixels)}."


def _description(scene: Scene, pixels: Pixels) -> str:
    if scene.kind == "shapes":
        if len(scene.things) <= 4 and all(len(group) == 1 for group in scene.groups.values()):
            parts = [f"{with_article(t.words)} at the {t.place}" for t in scene.things]
            return (
                f"The image shows {_list(parts)}, on a {scene.background[0]} background.".replace(
                    " a orange", " an orange"
                )
            )
        text = f"The image shows {summary(scene, pixels)}, on a {scene.background[0]} background."
        return text.replace(" a orange", " an orange")
    if scene.kind == "text":
        return (
            f"The image shows {summary(scene, pixels)} in {scene.text_colour[0]} on a "
            f"{scene.background[0]} background.".replace(" a orange", " an orange")
        )
    if scene.kind == "chart":
        colours = _list([bar.colour for bar in scene.bars])
        if len({bar.colour for bar in scene.bars}) == 1:
            return (
                f"The image shows a bar chart with {len(scene.bars)} {scene.bars[0].colour} bars."
            )
        return f"The image shows a bar chart with {len(scene.bars)} bars: {colours}."
    return full(scene, pixels)


def _unique(scene: Scene, words: Callable[[Thing], str]) -> list[Thing]:
    """The things that are identified uniquely by their `words`."""
    all_words = [words(thing) for thing in scene.things]
    return [
        t for t, word in zip(scene.things, all_words, strict=True) if all_words.count(word) == 1
    ]


def _name(rng: Random, scene: Scene, thing: Thing) -> str | None:
    """A description of a thing that fits no other thing in the picture."""
    choices = [thing.words] if thing in _unique(scene, lambda t: t.words) else []
    if thing in _unique(scene, lambda t: t.shape):
        choices += [thing.shape, thing.shape]
    return rng.choice(choices) if choices else None


def _absent(rng: Random, scene: Scene) -> str:
    present = {thing.shape for thing in scene.things}
    return rng.choice([shape for shape in SHAPES if shape not in present])


def colour(rng: Random, scene: Scene, held_out: bool) -> Asked | None:
    """The colour of a shape, which sometimes is not in the picture."""
    if rng.random() < 0.06:
        shape = _absent(rng, scene)
        question = ask(rng, "colour", held_out=held_out, x=shape)
        return Asked("not there", question, f"There is no {shape} in the image.")
    found = _unique(scene, lambda thing: thing.shape)
    if not found:
        return None
    thing = rng.choice(found)
    question = ask(rng, "colour", held_out=held_out, x=thing.shape)
    answers = (f"The {thing.shape} is {thing.colour}.", thing.colour.capitalize())
    return _short(rng, held_out, "colour", question, answers)


def shape(rng: Random, scene: Scene, held_out: bool) -> Asked | None:
    """The shape of the only thing of a colour."""
    found = _unique(scene, lambda thing: thing.colour)
    if not found:
        return None
    thing = rng.choice(found)
    question = ask(rng, "shape", held_out=held_out, x=thing.colour)
    answers = (
        f"The {thing.colour} shape is {with_article(thing.shape)}.",
        thing.shape.capitalize(),
    )
    return _short(rng, held_out, "shape", question, answers)


def count(rng: Random, scene: Scene, held_out: bool) -> Asked:
    """Ask for the number of things of a shape, of a colour, of both, or of all."""
    mode = rng.random()
    here = rng.choice(scene.things)
    if mode < 0.2:
        one, several, number = "shape", "shapes", len(scene.things)
        asked = rng.choice(("shapes", "objects", "things"))
        several, one = asked, asked[:-1]
    elif mode < 0.65:
        one = here.shape if rng.random() < 0.9 else _absent(rng, scene)
        several = plural(one)
        number = sum(thing.shape == one for thing in scene.things)
    elif mode < 0.82:
        name = here.colour if rng.random() < 0.85 else rng.choice(NAMES)
        one, several = f"{name} shape", f"{name} shapes"
        number = sum(thing.colour == name for thing in scene.things)
    else:
        name = here.colour if rng.random() < 0.75 else rng.choice(scene.things).colour
        one, several = f"{name} {here.shape}", f"{name} {plural(here.shape)}"
        number = sum(t.colour == name and t.shape == here.shape for t in scene.things)
    question = ask(rng, "count", held_out=held_out, x=several)
    said = f"There is 1 {one}." if number == 1 else f"There are {number or 'no'} {several}."
    return _short(rng, held_out, "count", question, (said, str(number)))


def exists(rng: Random, scene: Scene, held_out: bool) -> Asked:
    """Whether something is in the picture."""
    here = rng.choice(scene.things)
    if rng.random() < 0.6:
        name = here.shape if rng.random() < 0.5 else _absent(rng, scene)
        yes = any(thing.shape == name for thing in scene.things)
    else:
        name = here.words
        if rng.random() < 0.5:
            name = (
                f"{rng.choice(NAMES)} {here.shape}"
                if rng.random() < 0.6
                else (f"{here.colour} {rng.choice(SHAPES)}")
            )
        yes = any(thing.words == name for thing in scene.things)
    question = ask(rng, "exists", held_out=held_out, x=with_article(name))
    said = f"Yes, there is {with_article(name)}." if yes else f"No, there is no {name}."
    return _short(rng, held_out, "yes or no", question, (said, "Yes" if yes else "No"))


def is_colour(rng: Random, scene: Scene, held_out: bool) -> Asked | None:
    """Whether a shape has a colour."""
    found = _unique(scene, lambda thing: thing.shape)
    if not found:
        return None
    thing = rng.choice(found)
    name = thing.colour if rng.random() < 0.5 else rng.choice(NAMES)
    question = ask(rng, "is colour", held_out=held_out, x=thing.shape, y=name)
    yes = name == thing.colour
    said = f"{'Yes' if yes else 'No'}, the {thing.shape} is {thing.colour}."
    return _short(rng, held_out, "yes or no", question, (said, "Yes" if yes else "No"))


def where(rng: Random, scene: Scene, held_out: bool) -> Asked | None:
    """In which part of the picture a thing is, if that is unambiguous."""
    clear = [
        thing
        for thing in scene.things
        if all(abs(v - border) > 0.035 for v in (thing.x, thing.y) for border in (0.385, 0.615))
    ]
    if not clear:
        return None
    thing = rng.choice(clear)
    name = _name(rng, scene, thing)
    if name is None:
        return None
    question = ask(rng, "where", held_out=held_out, x=name)
    return Asked("place", question, f"The {name} is at the {thing.place}.")


_SIDES = {
    "left": ("to the left of", "left of"),
    "right": ("to the right of", "right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}


def _beside(scene: Scene, thing: Thing, side: str) -> list[Thing] | None:
    """Return the things on that side; None if the side of some thing is ambiguous."""
    found = []
    for other in scene.things:
        if other is thing:
            continue
        across, down = other.x - thing.x, other.y - thing.y
        offset = {"left": -across, "right": across, "above": -down, "below": down}[side]
        if abs(offset) < 0.12:
            return None
        if offset > 0:
            found.append(other)
    return found


def relation(rng: Random, scene: Scene, held_out: bool) -> Asked | None:
    """Ask for the thing on one side of another, if there is at most one."""
    for _ in range(6):
        thing, side = rng.choice(scene.things), rng.choice(list(_SIDES))
        name = _name(rng, scene, thing)
        found = _beside(scene, thing, side)
        if len(scene.things) < 2 or name is None or found is None or len(found) > 1:
            continue
        if not found and rng.random() < 0.5:
            continue
        words = rng.choice(_SIDES[side])
        question = ask(rng, "relation", held_out=held_out, r=words, x=name)
        said = with_article(found[0].words) if found else "nothing"
        answer = f"{said[0].upper()}{said[1:]} is {_SIDES[side][0]} the {name}."
        return Asked("beside", question, answer)
    return None


def is_relation(rng: Random, scene: Scene, held_out: bool) -> Asked | None:
    """Whether one thing is on a side of another."""
    if len(scene.things) < 2:
        return None
    one, other = rng.sample(scene.things, 2)
    side = rng.choice(list(_SIDES))
    across, down = one.x - other.x, one.y - other.y
    offset = {"left": -across, "right": across, "above": -down, "below": down}[side]
    names = _name(rng, scene, one), _name(rng, scene, other)
    if names[0] is None or names[1] is None or abs(offset) < 0.1:
        return None
    words = rng.choice(_SIDES[side])
    question = ask(rng, "is relation", held_out=held_out, x=names[0], y=names[1], r=words)
    place = f"the {names[0]} is {'' if offset > 0 else 'not '}{_SIDES[side][0]} the {names[1]}."
    yes = "Yes" if offset > 0 else "No"
    return _short(rng, held_out, "yes or no", question, (f"{yes}, {place}", yes))


def extreme(rng: Random, scene: Scene, held_out: bool) -> Asked | None:
    """The largest or smallest thing, if the next in size differs by a factor of at least 1.35."""
    if len(scene.things) < 2:
        return None
    kind = rng.choice(("largest", "smallest"))
    order = sorted(scene.things, key=lambda thing: thing.radius, reverse=kind == "largest")
    big, small = max(order[0].radius, order[1].radius), min(order[0].radius, order[1].radius)
    if big < 1.35 * small or order[0] not in _unique(scene, lambda thing: thing.words):
        return None
    question = ask(rng, kind, held_out=held_out)
    return Asked("size", question, f"The {kind} shape is the {order[0].words}.")


def ground(rng: Random, scene: Scene, held_out: bool) -> Asked:
    """The colour of the background."""
    question = ask(rng, "background", held_out=held_out)
    answers = (f"The background is {scene.background[0]}.", scene.background[0].capitalize())
    return _short(rng, held_out, "background", question, answers)


_SHAPES: tuple[tuple[Maker, float], ...] = (
    (colour, 3),
    (shape, 2),
    (count, 4),
    (exists, 2),
    (is_colour, 1),
    (where, 1.6),
    (relation, 2.4),
    (is_relation, 1.2),
    (extreme, 1),
    (ground, 0.7),
)


def _about_text(rng: Random, scene: Scene, held_out: bool) -> Asked:
    kind = rng.random()
    if kind < 0.12:
        question = ask(rng, "text colour", held_out=held_out)
        answers = (f"The text is {scene.text_colour[0]}.", scene.text_colour[0].capitalize())
        return _short(rng, held_out, "colour of text", question, answers)
    if kind < 0.2:
        return ground(rng, scene, held_out)
    one = len(scene.text) == 1
    name = "digit" if scene.text.isdigit() else "letter" if one else "word"
    wording = name if rng.random() < 0.8 or held_out else "word"
    question = ask(rng, wording, held_out=held_out)
    said = f"{_text_kind(scene.text).capitalize()} is {_quoted(scene.text)}."
    if name == "digit":
        name = "digit" if one else "number"
    return _short(rng, held_out, name, question, (said, scene.text))


def _bar_name(scene: Scene, index: int) -> str:
    bar = scene.bars[index]
    said = f"the {ORDINALS[index]} from the left"
    if len({one.colour for one in scene.bars}) > 1:
        said = f"the {bar.colour} one, {said}"
    return f"{bar.label}, {said}" if bar.label else said


def _about_chart(rng: Random, scene: Scene, held_out: bool) -> Asked:
    kind = rng.random()
    if kind < 0.3:
        question = ask(rng, "bars", held_out=held_out)
        number = str(len(scene.bars))
        return _short(rng, held_out, "bars", question, (f"The chart has {number} bars.", number))
    if kind < 0.75:
        word = rng.choice(("tallest", "shortest"))
        question = ask(rng, word, held_out=held_out)
        heights = [bar.height for bar in scene.bars]
        index = heights.index((max if word == "tallest" else min)(heights))
        return Asked("tallest bar", question, f"The {word} bar is {_bar_name(scene, index)}.")
    if kind < 0.92:
        index = rng.randrange(len(scene.bars))
        question = ask(rng, "bar colour", held_out=held_out, x=ORDINALS[index])
        name = scene.bars[index].colour
        answers = (f"The {ORDINALS[index]} bar is {name}.", name.capitalize())
        return _short(rng, held_out, "colour of a bar", question, answers)
    return Asked("kind", ask(rng, "kind", held_out=held_out), "It is a drawing of a bar chart.")


def _about_other(rng: Random, scene: Scene, held_out: bool) -> Asked:
    one = rng.choice(SHAPES)
    kind = rng.random()
    if kind < 0.3:
        question = ask(rng, "count", held_out=held_out, x=plural(one))
        return Asked("no drawing", question, f"There are no {plural(one)}.")
    if kind < 0.6:
        question = ask(rng, "exists", held_out=held_out, x=with_article(one))
        return Asked("no drawing", question, f"No, there is no {one}.")
    if kind < 0.8:
        question = ask(rng, "colour", held_out=held_out, x=one)
        return Asked("no drawing", question, f"There is no {one} in the image.")
    said = {
        "noise": "It is noise.",
        "plain": f"It is a plain {scene.colours[0] if scene.colours else ''} picture.",
        "stripes": "It is a pattern.",
        "gradient": "It is a gradient.",
    }
    answer = said.get(scene.kind, "It is a picture of soft colours.")
    return Asked("no drawing", ask(rng, "kind", held_out=held_out), answer)


def about(rng: Random, scene: Scene, pixels: Pixels, *, held_out: bool = False) -> Iterator[Asked]:
    """An endless stream of questions about a picture; questions may repeat."""
    drawn = scene.kind in ("shapes", "text", "chart")
    while True:
        mode = rng.random()
        if mode < 0.13:
            kind = "what" if drawn else "no drawing"
            yield Asked(kind, ask(rng, "what", held_out=held_out), full(scene, pixels))
        elif mode < 0.25:
            kind = "describe" if drawn else "no drawing"
            question = ask(rng, "describe", held_out=held_out)
            yield Asked(kind, question, _description(scene, pixels))
        elif scene.kind == "shapes":
            if rng.random() < 0.02:
                words = f"It is a drawing of {'shapes' if len(scene.things) > 1 else 'a shape'}."
                yield Asked("kind", ask(rng, "kind", held_out=held_out), words)
                continue
            maker = rng.choices([m for m, _ in _SHAPES], [weight for _, weight in _SHAPES])[0]
            made = maker(rng, scene, held_out)
            if made is not None:
                yield made
        elif scene.kind == "text":
            yield _about_text(rng, scene, held_out)
        elif scene.kind == "chart":
            yield _about_chart(rng, scene, held_out)
        else:
            yield _about_other(rng, scene, held_out)
