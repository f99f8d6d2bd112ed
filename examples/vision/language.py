"""Run a program of the frontend language that asks twice about a picture.

Run `python examples/vision/language.py --url URL`.
"""

import argparse
from pathlib import Path
from typing import Any

import headrace as sgl
from headrace.media import load_image

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--url", default="http://127.0.0.1:30000")
parser.add_argument("--image", type=Path, default=Path(__file__).parent / "drawing.png")
options = parser.parse_args()


@sgl.function
def look(s: sgl.ProgramState, picture: Any) -> None:
    s += sgl.user(sgl.image(picture) + "What is in the image?")
    s += sgl.assistant(sgl.gen("what", max_tokens=32, temperature=0))
    s += sgl.user("What colour is the circle?")
    choices = [f"The circle is {colour}." for colour in ("red", "green", "blue", "yellow")]
    s += sgl.assistant(sgl.select("colour", choices))


sgl.set_default_backend(sgl.RuntimeEndpoint(options.url))
state = look(load_image(options.image)[0])
print(state["what"])
print(state["colour"])
