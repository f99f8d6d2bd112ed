"""The vision demo model's recipe in its tiny form: it learns, and `transformers` reads it."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from recipes.demo_vision.draw import MAX_PIXELS, MIN_PIXELS, draw, prepare
from recipes.demo_vision.evaluate import ALL_KINDS
from recipes.demo_vision.feed import to_batch
from recipes.demo_vision.network import VisionNetwork
from recipes.demo_vision.questions import Asked
from recipes.demo_vision.rows import TWO, RowWriter
from recipes.demo_vision.scenes import random_scene
from recipes.demo_vision.shape import TINY, vision_tokenizer
from recipes.demo_vision.train import parser, train
from tests.support.engine import InProcessEngine
from tests.support.tiny_vision import IMAGE_ID, Prompt, Reference, picture, prompt_of

ARGUMENTS = (
    "--tiny --steps 16 --device cpu --rows 12 --pool 128 --cases 1 --probe 8 --workers 2 --seed 3"
)
FIRST = Asked("what", "What is in the image?", "The image shows a red circle.")
SECOND = Asked("count", "How many squares are there?", "There are no squares.")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("tiny-vision")
    losses = train(parser().parse_args(["--out", str(folder), *ARGUMENTS.split()]))
    return folder, losses


def test_loss_goes_down_and_every_kind_is_scored(trained: tuple[Path, list[float]]) -> None:
    folder, losses = trained
    assert len(losses) == 16
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    score = json.loads((folder / "eval.json").read_text())
    assert {name: row["of"] for name, row in score["kinds"].items()} == dict.fromkeys(ALL_KINDS, 1)
    assert (folder / "README.md").read_text().count("405,664 parameters") == 1


def test_training_goes_on_from_a_checkpoint(
    trained: tuple[Path, list[float]], tmp_path: Path
) -> None:
    arguments = ["--out", str(tmp_path), "--resume", str(trained[0]), *ARGUMENTS.split()]
    losses = train(parser().parse_args([*arguments, "--steps", "1"]))
    assert losses[0] < 0.9 * trained[1][0]


def test_transformers_computes_the_same(trained: tuple[Path, list[float]]) -> None:
    """One picture and two of other sizes: pixels, ids, positions, windows and logits."""
    transformers = pytest.importorskip("transformers")
    folder = trained[0]
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).float().eval()
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processing = pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    ).Qwen2VLImageProcessorPil.from_pretrained(folder)
    network = VisionNetwork(TINY)
    network.load_checkpoint(load_file(folder / "model.safetensors"))
    rng = Random(5)
    images = [draw(random_scene(rng)).resize(size) for size in ((400, 300), (130, 90))]
    for count in (1, 2):
        chosen = images[:count]
        content = [{"type": "image"} for _ in chosen] + [{"type": "text", "text": SECOND.question}]
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        pixels = processing(images=chosen, return_tensors="pt")
        grids = pixels["image_grid_thw"]
        pieces = text.split("<|image_pad|>")
        for index, grid in enumerate(grids):
            pieces[index] += "<|image_pad|>" * (int(grid.prod()) // 4)
        ids = tokenizer("".join(pieces), return_tensors="pt")["input_ids"]
        kinds = (ids == model.config.image_token_id).int()
        with torch.no_grad():
            wanted = model(
                input_ids=ids, mm_token_type_ids=kinds, pixel_values=pixels["pixel_values"],
                image_grid_thw=grids,
            ).logits[0, -1]  # fmt: skip
        writer = RowWriter(vision_tokenizer(), TWO, TINY.window)
        prepared = [prepare(image) for image in chosen]
        # The question stands alone in one row, and behind another one in the other row.
        rows = [writer.empty(), writer.empty()]
        writer.write(rows[0], prepared, [SECOND], prompt_only=True)
        assert list(rows[0]["ids"][: ids.shape[1]]) == ids[0].tolist()
        writer.write(rows[1], prepared, [FIRST, SECOND])
        start = rows[1]["at"][rows[1]["question"] == 1]
        places = [ids.shape[1] - 1, int(start[start >= 0][0])]
        with torch.no_grad():
            hidden = network(to_batch(rows, "cpu"))
        for number, place in enumerate(places):
            ours = network.logits(hidden[number, place])
            torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3)


def test_the_engine_generates_what_transformers_does(trained: tuple[Path, list[float]]) -> None:
    """Of a file in the older form, its names and its bfloat16 numbers."""
    folder = trained[0]
    engine, reference = InProcessEngine(folder), Reference(folder)
    tokens = {IMAGE_ID: reference.image_id}
    for number, parts in enumerate([(5, picture(4, 6, 1, 28), 4), (picture(5, 4, 2, 28), 3)], 1):
        prompt = prompt_of(*parts, seed=number)
        prompt = Prompt([tokens.get(each, each) for each in prompt.ids], prompt.images)
        engine.add(number, prompt.ids, 12, ignore_eos=True, images=prompt.images)
        engine.run()
        assert engine.tokens[number] == reference.greedy(prompt, 12)


def test_pictures_are_scaled_as_the_processor_does(trained: tuple[Path, list[float]]) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processing = module.Qwen2VLImageProcessorPil.from_pretrained(trained[0])
    grain = np.random.default_rng(0)
    for width, height in ((1, 1), (640, 480), (90, 400), (224, 224), (300, 113)):
        image = Image.fromarray(grain.integers(0, 256, (height, width, 3), np.uint8))
        wanted = processing(images=[image], return_tensors="np")["image_grid_thw"][0]
        ours = prepare(image)
        assert (ours.shape[0] // 14, ours.shape[1] // 14) == (wanted[1], wanted[2])
        assert MIN_PIXELS <= ours.shape[0] * ours.shape[1] <= MAX_PIXELS
