"""Images without HTTP: an engine of this process, programs on it, a batch file; `transformers`."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from headrace import Engine, assistant, function, gen, image, select, user, video
from headrace.batch import main
from headrace.media import load_image
from tests.support.pictures import base64_of, data_url, encoded, noise
from tests.support.seeing_model import QUESTION, prompt_with, seeing_model
from tests.support.tiny_gemma3_vision import tiny_gemma3_vision
from tests.support.tiny_vision import IMAGE_ID

FIRST, SECOND = noise(150, 120, seed=4), noise(120, 350, seed=6)
PNG = encoded(FIRST)
NUM_TOKENS = 6
GREEDY = {"max_new_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(model_path=str(seeing_model()), max_total_tokens=8192, dtype="float32") as found:
        yield found


@pytest.fixture(scope="module")
def answer(engine: Engine) -> str:
    return str(engine.generate(prompt_with(1), GREEDY, image_data=PNG)["text"])


@pytest.mark.parametrize("images", [[FIRST], [SECOND, FIRST]], ids=["one", "two"])
def test_the_same_as_transformers(engine: Engine, images: list[Any]) -> None:
    """From the file to the tokens, by its own processor, tokenizer and model."""
    transformers = pytest.importorskip("transformers")
    folder = seeing_model()
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).float().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    pixels = module.Qwen2VLImageProcessorPil.from_pretrained(folder)(
        images=images, return_tensors="pt"
    )
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    assert text == prompt_with(len(images))
    pieces = text.split("<|image_pad|>")
    for index, grid in enumerate(pixels["image_grid_thw"]):
        pieces[index] += "<|image_pad|>" * (int(grid.prod()) // 4)
    ids = tokenizer("".join(pieces), return_tensors="pt")["input_ids"]
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        **pixels,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    found = engine.generate(
        prompt_with(len(images)), GREEDY, image_data=images, return_prompt_token_ids=True
    )
    assert found["prompt_token_ids"] == ids[0].tolist()
    assert found["output_ids"] == made[0, ids.shape[1] :].tolist()


async def test_every_form_of_a_picture(engine: Engine, answer: str, tmp_path: Path) -> None:
    path = tmp_path / "a picture.png"
    path.write_bytes(PNG)
    turned = Image.Exif()
    turned[0x0112] = 3
    upside_down = Image.open(io.BytesIO(encoded(FIRST.rotate(180), exif=turned)))
    for form in (
        FIRST, PNG, path, str(path), f"file://{path}", base64_of(PNG), data_url(PNG),
        {"url": str(path)}, [FIRST], load_image(str(path)), upside_down, Image.open(path),
    ):  # fmt: skip
        found = engine.generate(prompt_with(1), GREEDY, image_data=form)
        assert found["text"] == answer, form
    found = await engine.async_generate(prompt_with(1), GREEDY, image_data=path)
    assert found["text"] == answer
    chunks = engine.generate(prompt_with(1), GREEDY, image_data=FIRST, stream=True)
    assert "".join(chunk["text_delta"] for chunk in chunks) == answer
    several = engine.generate(
        [prompt_with(1), "Hello", prompt_with(2)], GREEDY, image_data=[PNG, None, [FIRST, SECOND]]
    )
    assert several[0]["text"] == answer
    assert [each["meta_info"].get("image_tokens", 0) > 0 for each in several] == [True, False, True]


@pytest.mark.parametrize(
    ("image_data", "words"),
    [
        ("missing.png", "image_data: .*No such file"),
        (5, "image_data: An image is a path"),
        ([PNG, PNG], "1 placeholders .* 2 images"),
        (b"not a picture", "PNG, JPEG, WebP"),
        (Path("/dev/null"), "the image is empty"),
    ],
)
def test_a_mistake_is_a_value_error(engine: Engine, image_data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine.generate(prompt_with(1), GREEDY, image_data=image_data)


@function
def image_qa(s: Any, image_file: Any, question: str) -> None:
    s += user(image(image_file) + question)
    s += assistant(gen("answer", max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))


def test_programs(engine: Engine, answer: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    picture, _ = load_image(str(path))
    for form in (picture, FIRST, str(path)):
        state = image_qa.run(form, QUESTION, backend=engine)
        assert state["answer"] == answer

    @function
    def several(s: Any) -> None:
        s += user(image(FIRST) + image(SECOND) + QUESTION)
        s += assistant(gen("a", max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))
        s += user("Is it red?")
        s += assistant(select("b", ["yes", "no"]))

    state = several.run(backend=engine)
    native = engine.generate(prompt_with(2), GREEDY, image_data=[FIRST, SECOND])
    assert state["a"] == native["text"]
    assert state["b"] in ("yes", "no")


def test_frames_of_a_video_are_pictures(engine: Engine, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (112, 112), colour) for colour in ("red", "lime", "blue", "white")]
    path = tmp_path / "film.webp"
    frames[0].save(path, save_all=True, append_images=frames[1:], lossless=True)

    @function
    def watch(s: Any, film: Any) -> None:
        s += user(video(film, num_frames=3) + QUESTION)
        s += assistant(gen("answer", max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True))

    # The first one, the last one and one between.
    chosen = [frames[0], frames[2], frames[3]]
    wanted = engine.generate(prompt_with(3), GREEDY, image_data=chosen)["text"]
    for film in (path, frames, [encoded(frame) for frame in frames]):
        assert watch.run(film, backend=engine)["answer"] == wanted


def test_lines_of_a_batch(answer: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    content = [
        {"type": "image_url", "image_url": {"url": str(path)}},
        {"type": "text", "text": QUESTION},
    ]
    messages = [{"role": "user", "content": content}]
    lines = [
        {"text": prompt_with(1), "image_data": str(path), "sampling_params": GREEDY},
        {"messages": messages, "sampling_params": GREEDY},
        {
            "custom_id": "a",
            "url": "/v1/chat/completions",
            "body": {
                "model": "m", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0,
            },
        },
        {"text": prompt_with(1), "image_data": "missing.png", "sampling_params": GREEDY},
        {
            "custom_id": "b",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": [
                {"type": "image_url", "image_url": {"url": "missing.png"}}]}]},
        },
    ]  # fmt: skip
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    options = ["--model-path", str(seeing_model()), "--grammar-backend", "none"]
    assert main(str(source), str(target), options, io.StringIO()) == 1
    written = [json.loads(line) for line in target.read_text().splitlines()]
    found = {each.get("custom_id", each.get("index")): each for each in written}
    assert found[0]["text"] == found[1]["text"] == answer
    body = found["a"]["response"]["body"]
    assert body["choices"][0]["message"]["content"] == answer
    assert "No such file" in found[3]["error"]["message"]
    assert found["b"]["response"]["status_code"] == 400
    assert "No such file" in found["b"]["response"]["body"]["error"]["message"]


def gemma_folder(target: Path) -> Path:
    """The tiny Gemma 3 with its words for images at the ids that its configuration names."""
    shutil.copytree(tiny_gemma3_vision(), target)
    path = str(target / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    words = [f"<filler {at}>" for at in range(tokenizer.get_vocab_size(), IMAGE_ID)]
    words += ["<image_soft_token>", "<filler>", "<start_of_image>", "<end_of_image>"]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words])
    assert tokenizer.token_to_id("<image_soft_token>") == IMAGE_ID
    tokenizer.save(path)
    return target


def test_a_family_whose_marker_is_a_token_of_its_own(tmp_path: Path) -> None:
    """Gemma 3 gives each image one square and as many tokens, and sets words around them."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.gemma3.image_processing_pil_gemma3")
    folder = gemma_folder(tmp_path / "gemma")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"
    text = "The mill: <start_of_image> and the wheel:<start_of_image>?"
    ids = tokenizer.encode(text.replace("<start_of_image>", whole)).ids
    processor = module.Gemma3ImageProcessorPil.from_pretrained(folder)
    pixels = processor(images=[FIRST, SECOND], return_tensors="pt")["pixel_values"]
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).float().eval()
    tokens = torch.tensor([ids])
    made = model.generate(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        token_type_ids=(tokens == IMAGE_ID).int(),
        pixel_values=pixels,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
    )
    wanted = made[0, len(ids) :].tolist()
    marked = tokenizer.encode(text).ids
    images = [FIRST, SECOND]
    with Engine(model_path=str(folder), dtype="float32") as gemma:
        found = gemma.generate(text, GREEDY, image_data=images, return_prompt_token_ids=True)
        assert found["prompt_token_ids"] == ids
        assert found["output_ids"] == wanted
        assert found["meta_info"]["image_tokens"] == 32
        # As token ids the line feeds are tokens of their own.
        as_ids = gemma.generate(
            input_ids=marked, sampling_params=GREEDY, image_data=images,
            return_prompt_token_ids=True,
        )  # fmt: skip
        assert as_ids["meta_info"]["image_tokens"] == 32
        assert as_ids["prompt_token_ids"].count(IMAGE_ID) == 32
        given = gemma.generate(input_ids=ids, sampling_params=GREEDY, image_data=images)
        assert given["output_ids"] == wanted
