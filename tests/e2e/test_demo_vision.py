"""The demo model that sees, served: it answers questions about drawings that it has not seen."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from random import Random

import pytest
from openai import AsyncOpenAI
from PIL import Image

from recipes.demo_vision.draw import draw, prepare
from recipes.demo_vision.evaluate import Case, is_right
from recipes.demo_vision.questions import about
from recipes.demo_vision.scenes import random_scene
from tests.support.pictures import data_url, encoded
from tests.support.server import ROOT, ServerProcess, python_path

KINDS = ("what", "colour", "count")
OF_EACH = 20


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--model-path", "demo-vision") as running:
        yield running.wait_ready()


def held_out() -> list[tuple[Image.Image, Case]]:
    """Drawings with a question each, the same number of every kind."""
    rng, left = Random("served drawings"), dict.fromkeys(KINDS, OF_EACH)
    found = []
    while any(left.values()):
        scene = random_scene(rng)
        picture = draw(scene)
        pixels = prepare(picture)
        asked = next(about(rng, scene, pixels))
        kind = asked.kind.split(",")[0]
        if left.get(kind):
            left[kind] -= 1
            found.append((picture, Case(kind, (pixels,), asked)))
    return found


async def test_nine_of_ten_held_out_drawings_are_understood(server: ServerProcess) -> None:
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def ask(picture: Image.Image, case: Case) -> str:
        image = {"type": "image_url", "image_url": {"url": data_url(encoded(picture))}}
        text = {"type": "text", "text": case.asked.question}
        answer = await client.chat.completions.create(
            model="demo-vision",
            messages=[{"role": "user", "content": [image, text]}],  # type: ignore[list-item, misc]
            temperature=0,
            max_tokens=64,
        )
        return answer.choices[0].message.content or ""

    cases = held_out()
    answers = await asyncio.gather(*(ask(*each) for each in cases))
    right: dict[str, int] = defaultdict(int)
    for (_, case), said in zip(cases, answers, strict=True):
        right[case.kind] += is_right(case, said)
    assert all(right[kind] >= 0.9 * OF_EACH for kind in KINDS), right


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("chat", "What is in the image? The image shows a red circle"),
        ("chat", "Two pictures: Yes, both show the same."),
        ("native", "What colour is the circle? The circle is red."),
        ("language", "The circle is red."),
    ],
)
def test_examples_say_what_is_drawn(server: ServerProcess, name: str, says: str) -> None:
    assert says in _run(f"examples/vision/{name}.py", "--url", server.url)


def test_the_engine_takes_a_pil_image() -> None:
    assert "How many squares are there? There are 2 squares." in _run("examples/vision/engine.py")


def _run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={"PYTHONPATH": python_path(), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
