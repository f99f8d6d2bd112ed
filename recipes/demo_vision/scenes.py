"""The contents of pictures: things with shapes, colours and places; digits and words; charts."""

from dataclasses import dataclass, field
from random import Random

from recipes.demo_vision.colours import NAMES, Rgb, contrasting, shade
from recipes.demo_vision.shapes import SHAPES

# Borders between left, centre and right, as shares of the width; likewise from top to bottom.
LOW, HIGH = 0.385, 0.615


@dataclass(frozen=True)
class Thing:
    """A shape in a picture.

    Attributes:
        shape, colour: their names.
        rgb: the drawn colour.
        x, y: centre, as shares of the picture's width and height.
        radius: as a share of the picture's shorter side.
        outline: whether only the outline is drawn.
    """

    shape: str
    colour: str
    rgb: Rgb
    x: float
    y: float
    radius: float
    outline: bool = False

    @property
    def words(self) -> str:
        """For example `red circle`."""
        return f"{self.colour} {self.shape}"

    @property
    def place(self) -> str:
        """For example `top left` or `centre`."""
        row = "top" if self.y < LOW else "bottom" if self.y > HIGH else ""
        column = "left" if self.x < LOW else "right" if self.x > HIGH else ""
        return f"{row} {column}".strip() or "center"


@dataclass(frozen=True)
class Bar:
    """A bar of a chart: `height` is a share of the maximum."""

    colour: str
    rgb: Rgb
    height: float
    label: str = ""


@dataclass(frozen=True)
class Scene:
    """One picture.

    Attributes:
        kind: `shapes`, `text`, `chart`, `noise`, `gradient`, `blobs`, `stripes` or `plain`.
        size: width and height in pixels.
        background: the colour's name and value.
        things: for `shapes`, from left to right.
        text: for `text`, the text.
        text_colour: for `text`.
        bars: for `chart`.
        colours: for pictures without a drawing, largest share first; `gradient`: from its start.
        seed: for the strokes.
    """

    kind: str
    size: tuple[int, int]
    background: tuple[str, Rgb]
    things: tuple[Thing, ...] = ()
    text: str = ""
    text_colour: tuple[str, Rgb] = ("black", (0, 0, 0))
    bars: tuple[Bar, ...] = ()
    colours: tuple[str, ...] = ()
    seed: int = 0
    groups: dict[tuple[str, str], list[Thing]] = field(default_factory=dict)


_SIZES = ((224, 224),) * 6 + (
    (256, 256), (200, 200), (320, 240), (300, 200), (128, 128), (112, 112), (400, 300), (240, 320),
    (300, 300), (100, 100), (160, 120), (336, 224), (196, 196), (168, 168), (512, 512), (640, 480),
)  # fmt: skip
_SMALL_SIZES = ((112, 112), (140, 140), (128, 128), (168, 140), (224, 224), (224, 224), (200, 150))


def picture_size(rng: Random, *, small: bool = False) -> tuple[int, int]:
    """Width and height in pixels of a picture as a user might send it."""
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(_SMALL_SIZES if small else _SIZES)
    if kind < 0.7:
        return 28 * rng.randint(4, 9), 28 * rng.randint(4, 9)
    side, aspect = rng.uniform(90, 320), rng.uniform(0.6, 1.67)
    return round(side * aspect**0.5), round(side / aspect**0.5)


def background(rng: Random) -> tuple[str, Rgb]:
    """The colour of the background: white in half of them."""
    kind = rng.random()
    if kind < 0.5:
        return "white", (255, 255, 255) if rng.random() < 0.7 else shade(rng, "white")
    name = "black" if kind < 0.58 else rng.choice(NAMES)
    return name, shade(rng, name)


def _places(
    rng: Random, count: int, size: tuple[int, int], radius: tuple[float, float]
) -> list[tuple[float, float, float]]:
    """Up to `count` places that do not touch: x, y, radius as in `Thing`."""
    width, height = size
    short = min(size)
    found: list[tuple[float, float, float]] = []
    on_grid = count <= 6 and rng.random() < 0.45
    cells = rng.sample([(column, row) for column in range(3) for row in range(3)], 9)
    for _ in range(count * 14):
        if len(found) == count:
            break
        r = rng.uniform(*radius)
        edge_x, edge_y = 1.15 * r * short / width, 1.15 * r * short / height
        if on_grid:
            column, row = cells[len(found)]
            x, y = (0.2 + 0.3 * v + rng.uniform(-0.06, 0.06) for v in (column, row))
            r = min(r, 0.145)
        else:
            x, y = rng.uniform(edge_x, 1 - edge_x), rng.uniform(edge_y, 1 - edge_y)
        if any(
            ((x - a) * width) ** 2 + ((y - b) * height) ** 2 < (1.22 * (r + s) * short) ** 2
            for a, b, s in found
        ):
            continue
        found.append((x, y, r))
    return found


def _kinds(rng: Random, count: int) -> list[tuple[str, int]]:
    """The shape of each thing, and the index of its colour."""
    mode = rng.random()
    if count == 1 or mode < 0.3:  # all different
        chosen = rng.sample(SHAPES, count)
        return [(shape, index) for index, shape in enumerate(chosen)]
    if mode < 0.6:  # one shape, one colour, perhaps some others
        others = rng.randint(0, min(3, count - 1)) if rng.random() < 0.6 else 0
        first, second = rng.sample(SHAPES, 2)
        same = rng.random() < 0.3
        return [(first, 0)] * (count - others) + [(second, 0 if same else 1)] * others
    if mode < 0.75:  # one shape, any colours
        shape = rng.choice(SHAPES)
        return [(shape, rng.randrange(4)) for _ in range(count)]
    if mode < 0.85:  # one colour, any shapes
        return [(rng.choice(SHAPES[:6]), 0) for _ in range(count)]
    return [(rng.choice(SHAPES), rng.randrange(4)) for _ in range(count)]


_COUNTS, _COUNT_WEIGHTS = (1, 2, 3, 4, 5, 6), (16, 24, 22, 14, 12, 12)


def shapes_scene(rng: Random, size: tuple[int, int]) -> Scene:
    """One to six shapes that do not touch."""
    ground = background(rng)
    count = rng.choices(_COUNTS, _COUNT_WEIGHTS)[0]
    top = (0.36, 0.3, 0.24, 0.19, 0.17, 0.15)[count - 1]
    low = max(0.075, min(0.1, 11 / min(size)))
    if rng.random() < 0.3:
        top = max(low + 0.01, top * 0.6)
    places = _places(rng, count, size, (low, top))
    palette: list[tuple[str, Rgb]] = []
    left = [name for name in NAMES if name != ground[0]]
    while len(palette) < 6:
        chosen = contrasting(rng, ground[1], left)
        if chosen is None:
            break
        palette.append(chosen)
        left.remove(chosen[0])
    outline = rng.random() < 0.1
    things = []
    for (x, y, radius), (shape, colour) in zip(places, _kinds(rng, len(places)), strict=True):
        name, rgb = palette[colour % len(palette)]
        things.append(Thing(shape, name, rgb, x, y, radius, outline))
    things.sort(key=lambda thing: (thing.x, thing.y))
    groups: dict[tuple[str, str], list[Thing]] = {}
    for thing in things:
        groups.setdefault((thing.colour, thing.shape), []).append(thing)
    return Scene("shapes", size, ground, tuple(things), groups=groups, seed=rng.randrange(1 << 30))


WORDS = (
    "hello", "stop", "yes", "no", "cat", "dog", "sun", "open", "exit", "go", "help", "hi", "book",
    "tree", "fish", "love", "home", "red", "blue", "green", "one", "two", "ten", "start", "end",
    "left", "right", "up", "down", "sale", "free", "new", "old", "hot", "cold", "day", "night",
    "apple", "milk", "tea", "car", "bus", "taxi", "zoo", "park", "moon", "star", "rain", "snow",
    "good", "bad", "test", "demo", "image", "text", "world", "water", "house", "happy", "thanks",
)  # fmt: skip


def text_scene(rng: Random, size: tuple[int, int]) -> Scene:
    """A digit, a number of two digits, a capital letter or a word."""
    kind = rng.random()
    if kind < 0.5:
        text = str(rng.randrange(10))
    elif kind < 0.62:
        text = str(rng.randint(10, 99))
    elif kind < 0.75:
        text = rng.choice("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    else:
        text = rng.choice(WORDS)
        text = text.upper() if rng.random() < 0.5 else text
    ground = background(rng)
    names = [name for name in NAMES if name != ground[0]]
    if rng.random() < 0.4:
        names = ["black" if ground[0] not in ("black", "blue", "purple", "brown") else "white"]
    colour = contrasting(rng, ground[1], names) or ("black", (0, 0, 0))
    seed = rng.randrange(1 << 30)
    return Scene("text", size, ground, text=text, text_colour=colour, seed=seed)


def chart_scene(rng: Random, size: tuple[int, int]) -> Scene:
    """A chart of two to six bars with clearly different heights."""
    ground = ("white", (255, 255, 255)) if rng.random() < 0.8 else ("white", shade(rng, "white"))
    count = rng.randint(2, 6)
    steps = rng.sample(range(2, 2 + max(9, count + 3)), count)
    top = max(steps)
    names = [name for name in NAMES if name not in ("white", "yellow")]
    same = rng.random() < 0.35
    colours = [rng.choice(names)] * count if same else rng.sample(names, count)
    labelled = rng.random() < 0.5
    bars, first = [], None
    for index, (step, name) in enumerate(zip(steps, colours, strict=True)):
        rgb = first if same and first else shade(rng, name)
        first = first or rgb
        bars.append(Bar(name, rgb, step / top, "ABCDEF"[index] if labelled else ""))
    return Scene("chart", size, ground, bars=tuple(bars), seed=rng.randrange(1 << 30))


def other_scene(rng: Random, size: tuple[int, int]) -> Scene:
    """A picture that is not a drawing: noise, a gradient, soft blobs, stripes, or one colour."""
    kind = rng.choice(("noise", "gradient", "blobs", "stripes", "plain"))
    names = rng.sample(NAMES, 2)
    colours = tuple(names) if kind in ("gradient", "stripes") else tuple(names[:1])
    ground = (names[0], shade(rng, names[0]))
    other = (names[1], shade(rng, names[1]))
    seed = rng.randrange(1 << 30)
    return Scene(kind, size, ground, colours=colours, text_colour=other, seed=seed)


def random_scene(rng: Random, *, small: bool = False) -> Scene:
    """A picture of any kind."""
    size = picture_size(rng, small=small)
    kind = rng.random()
    if kind < 0.68:
        return shapes_scene(rng, size)
    if kind < 0.82:
        return text_scene(rng, size)
    if kind < 0.92:
        return chart_scene(rng, size)
    return other_scene(rng, size)
