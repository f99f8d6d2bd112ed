"""One question about one picture through every API; the answers must be the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from PIL import Image

from tests.support.native import generate, refused, run_example, stream, tokenize
from tests.support.pictures import base64_of, data_url, encoded, noise
from tests.support.seeing_model import PLACEHOLDER, QUESTION, prompt_with, seeing_model
from tests.support.server import ServerProcess

FIRST, SECOND = noise(150, 120, seed=4), noise(120, 350, seed=6)
PNG, WEBP = encoded(FIRST), encoded(SECOND, "WEBP", lossless=True)
NUM_TOKENS = 8
GREEDY = {"max_new_tokens": NUM_TOKENS, "temperature": 0}
CHAT: dict[str, Any] = {"model": "m", "temperature": 0}
IMAGE_PART = {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "low"}}
TEXT_PART = {"type": "text", "text": QUESTION}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("pictures")
    (found / "first.png").write_bytes(PNG)
    (found / "other.png").symlink_to(Path(__file__))
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    options = ("--media-root", str(folder), "--enable-cache-report")
    with ServerProcess("--model-path", str(seeing_model()), *options) as made:
        yield made.wait_ready()


@pytest.fixture(scope="module")
def answer(server: ServerProcess) -> str:
    """What each way must say of the first picture."""
    found = generate(server, text=prompt_with(1), image_data=base64_of(PNG), sampling_params=GREEDY)
    assert found["meta_info"]["image_tokens"] == 20
    other = generate(
        server, text=prompt_with(1), image_data=base64_of(WEBP), sampling_params=GREEDY
    )
    assert found["text"] != other["text"], "the model does not look"
    return str(found["text"])


def chat(server: ServerProcess, content: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return server.client.post(
        "/v1/chat/completions",
        json={**CHAT, "messages": messages, "max_tokens": NUM_TOKENS, **fields},
    )


def said(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def message_of(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


def test_the_model_says_that_it_sees(server: ServerProcess) -> None:
    info = server.client.get("/get_model_info").json()
    assert info["has_image_understanding"] is True
    assert "vision" in server.client.post("/api/show", json={"model": "m"}).json()["capabilities"]


def test_every_form_of_image_data(server: ServerProcess, answer: str, folder: Path) -> None:
    item = data_url(PNG)
    path = folder / "first.png"
    for given in (
        item, [item], [[item]], {"url": item, "detail": "auto"}, [{"url": base64_of(PNG)}],
        "first.png", str(path), f"file://{path}",
    ):  # fmt: skip
        found = generate(server, text=prompt_with(1), image_data=given, sampling_params=GREEDY)
        assert found["text"] == answer, given


def test_token_ids_with_one_placeholder_or_all_of_them(server: ServerProcess, answer: str) -> None:
    ids = tokenize(server, prompt_with(1))
    (pad,) = tokenize(server, "<|image_pad|>")
    at = ids.index(pad)
    for given in (ids, [*ids[:at], *[pad] * 20, *ids[at + 1 :]]):
        found = generate(server, input_ids=given, image_data=data_url(PNG), sampling_params=GREEDY)
        assert found["text"] == answer
        assert found["meta_info"]["prompt_tokens"] == len(ids) + 19
    body = {"image_data": data_url(PNG), "sampling_params": GREEDY}
    words = refused(server, input_ids=[*ids[:at], *[pad] * 7, *ids[at + 1 :]], **body)
    assert "7 placeholder tokens" in words
    assert "image takes 20" in words


def test_batches_and_samples(server: ServerProcess, answer: str) -> None:
    item, other = data_url(PNG), data_url(WEBP)
    prompts = [prompt_with(1), "Hello", prompt_with(2), prompt_with(0)]
    found = generate(
        server, text=prompts, image_data=[item, None, [item, other], []], sampling_params=GREEDY
    )
    images = [each["meta_info"].get("image_tokens") for each in found]
    assert found[0]["text"] == answer
    assert [images[0], images[1], images[3]] == [20, None, None]
    assert images[2] > 40
    # One picture is for every prompt; samples share it.
    twice = generate(
        server, text=[prompt_with(1)] * 2, image_data=item, sampling_params={**GREEDY, "n": 2}
    )
    assert [each["text"] for each in twice] == [answer] * 4
    *_, last = stream(server, text=prompt_with(1), image_data=item, sampling_params=GREEDY)
    assert last["text"] == answer


def test_a_large_body(server: ServerProcess) -> None:
    """It is taken apart beside the loop."""
    large = [data_url(encoded(noise(900, 900, seed=seed))) for seed in range(2)]
    found = generate(server, text=prompt_with(2), image_data=large, sampling_params=GREEDY)
    assert found["meta_info"]["image_tokens"] == 2 * 64


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"text": prompt_with(2)}, "2 placeholders"),
        ({"text": prompt_with(0)}, "0 placeholders"),
        ({"text": [prompt_with(1)] * 3, "image_data": ["a", "b"]}, "each of the 3 prompts"),
        ({"text": prompt_with(1), "image_data": [[["a"]]]}, "image_data"),
        ({"text": prompt_with(1), "image_data": [["a"], ["b"]]}, "one prompt are an image, or"),
        ({"text": prompt_with(1), "image_data": 5}, "image_data"),
        ({"text": prompt_with(1), "image_data": {"path": "a"}}, "url"),
        ({"text": prompt_with(17), "image_data": ["a"] * 17}, "at most 16 images"),
        ({"text": prompt_with(1), "image_data": "http://127.0.0.1/a.png"}, "--allow-media-urls"),
        ({"text": prompt_with(1), "image_data": "/etc/passwd"}, "under --media-root"),
        ({"text": prompt_with(1), "image_data": "other.png"}, "under --media-root"),
        ({"text": prompt_with(1), "image_data": "data:image/png;base64,AAAA"}, "PNG, JPEG, WebP"),
        ({"text": prompt_with(1), "image_data": data_url(PNG[:500])}, "damaged or cut off"),
        ({"text": prompt_with(1), "image_data": data_url(encoded(noise(1, 1)))}, "4 to 32768"),
        ({"text": prompt_with(1), "image_data": None}, "1 placeholder tokens"),
        ({"text": prompt_with(1), "video_data": "a"}, "video_data is not supported"),
        ({"text": prompt_with(1), "session_params": {"id": "s"}}, "session"),
    ],
)
def test_what_is_refused(server: ServerProcess, fields: dict[str, Any], words: str) -> None:
    body = {"image_data": data_url(PNG), "sampling_params": GREEDY, **fields}
    assert words in refused(server, **body)


def test_what_is_too_long_with_its_images(server: ServerProcess) -> None:
    square = data_url(encoded(noise(300, 300)))
    question = " wheel" * 660
    text = prompt_with(1, question)
    assert len(tokenize(server, text)) < 2048
    words = refused(server, text=text, image_data=square, sampling_params=GREEDY)
    assert "longer than the model's context length" in words
    found = chat(server, [{**IMAGE_PART, "image_url": square}, {**TEXT_PART, "text": question}])
    assert found.json()["error"]["code"] == "context_length_exceeded"


def test_routes_that_take_none(server: ServerProcess) -> None:
    instance = {"text": prompt_with(1), "image_data": data_url(PNG)}
    response = server.client.post("/vertex_generate", json={"instances": [instance]})
    assert response.status_code == 400
    assert "image_data is not accepted on this route" in response.text
    # A placeholder that comes another way finds no image.
    for path, body in (
        ("/v1/completions", {"prompt": prompt_with(1)}),
        ("/generate", {"input_ids": tokenize(server, prompt_with(1))}),
    ):
        response = server.client.post(path, json=body)
        assert response.status_code == 400
        assert "0 images came with it" in response.text


def test_openai_s_client(server: ServerProcess, answer: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def ask(*parts: Any, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": [*parts, TEXT_PART]}]
        return client.chat.completions.create(
            messages=messages, max_tokens=NUM_TOKENS, **CHAT, **fields
        )

    found = ask(IMAGE_PART)
    assert found.choices[0].message.content == answer
    assert found.usage.prompt_tokens == len(tokenize(server, prompt_with(1))) + 19
    assert found.usage.prompt_tokens_details.model_dump()["image_tokens"] == 20
    chunks = ask(IMAGE_PART, stream=True)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == answer
    several: Any = [IMAGE_PART, {"type": "image_url", "image_url": {"url": data_url(WEBP)}}]
    native = generate(
        server, text=prompt_with(2), image_data=[data_url(PNG), data_url(WEBP)],
        sampling_params=GREEDY,
    )  # fmt: skip
    both = ask(*several)
    assert both.choices[0].message.content == native["text"]
    assert both.usage.prompt_tokens == native["meta_info"]["prompt_tokens"]
    # The order of the pictures is part of the question.
    assert ask(*reversed(several)).choices[0].message.content != native["text"]
    with pytest.raises(openai.BadRequestError, match="base64"):
        ask({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}})
    with pytest.raises(openai.BadRequestError, match=r"text and images \(image_url\) only"):
        ask({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}})
    with pytest.raises(openai.BadRequestError, match="detail"):
        ask({"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "huge"}})


def test_the_responses_api(server: ServerProcess, answer: str) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    content: Any = [
        {"type": "input_image", "image_url": data_url(PNG), "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    request: Any = {"model": "m", "input": [{"role": "user", "content": content}]}
    found = client.responses.create(**request, max_output_tokens=16, temperature=0)
    assert found.output_text.startswith(answer)
    # The picture is part of the conversation that the next turn goes on from.
    again = client.responses.create(
        model="m", input="And now?", previous_response_id=found.id, max_output_tokens=16
    )
    assert again.usage is not None
    assert found.usage is not None
    assert again.usage.input_tokens > found.usage.input_tokens
    counted = server.client.post("/v1/responses/input_tokens", json=request)
    assert counted.json()["input_tokens"] == found.usage.input_tokens
    content[0] = {"type": "input_image", "file_id": "file-1"}
    with pytest.raises(openai.BadRequestError, match="needs an address, or its data"):
        client.responses.create(**request)


def test_anthropic_s_client(server: ServerProcess, answer: str) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": base64_of(PNG)}

    def request(source: Any) -> Any:
        content = [{"type": "image", "source": source}, TEXT_PART]
        return {"model": "m", "messages": [{"role": "user", "content": content}]}

    body = request(source)
    found = client.messages.create(max_tokens=NUM_TOKENS, extra_body={"temperature": 0}, **body)
    assert "".join(block.text for block in found.content if block.type == "text") == answer
    counted = client.messages.count_tokens(**body)
    used = found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)
    assert counted.input_tokens == used
    url: Any = {"type": "url", "url": "https://pictures.example/a.png"}
    with pytest.raises(anthropic.BadRequestError, match="--allow-media-urls"):
        client.messages.create(max_tokens=1, **request(url))
    with pytest.raises(anthropic.BadRequestError, match=r"source\.type must be base64 or url"):
        client.messages.create(max_tokens=1, **request({"type": "file", "file_id": "f"}))


def test_ollama_s_routes(server: ServerProcess, answer: str) -> None:
    options = {"temperature": 0, "num_predict": NUM_TOKENS}
    body = {"model": "m", "stream": False, "options": options}
    message = {"role": "user", "content": QUESTION, "images": [base64_of(PNG)]}
    found = server.client.post("/api/chat", json={**body, "messages": [message]})
    assert found.json()["message"]["content"] == answer
    asked = {**body, "images": [base64_of(PNG)]}
    for fields in ({"prompt": QUESTION}, {"prompt": prompt_with(1), "raw": True}):
        found = server.client.post("/api/generate", json={**asked, **fields})
        assert found.json()["response"] == answer
    # Base64 only: nothing is fetched or opened on this wire.
    for image in ("first.png", "http://127.0.0.1/a.png"):
        refusal = server.client.post(
            "/api/generate", json={**body, "prompt": "a", "images": [image]}
        )
        assert refusal.status_code == 400, refusal.text


def test_a_placeholder_that_somebody_only_spells(server: ServerProcess, answer: str) -> None:
    spelled = {"type": "text", "text": f"What does {PLACEHOLDER} mean?"}
    for content in ([spelled], [IMAGE_PART, spelled], spelled["text"]):
        assert "split_special_tokens" in message_of(chat(server, content))
        split = chat(server, content, split_special_tokens=True)
        assert split.status_code == 200, split.text
    same = chat(server, [IMAGE_PART, TEXT_PART], split_special_tokens=True)
    assert said(same) == answer


def test_pictures_anywhere_in_a_conversation(server: ServerProcess, answer: str) -> None:
    """Each stands where it was sent, a turn earlier or behind the text."""
    turns = [
        {"role": "user", "content": [TEXT_PART, IMAGE_PART]},
        {"role": "assistant", "content": "A picture."},
        {"role": "user", "content": [{"type": "image_url", "image_url": data_url(WEBP)}]},
    ]
    found = server.client.post(
        "/v1/chat/completions", json={**CHAT, "messages": turns, "max_tokens": NUM_TOKENS}
    )
    first, second = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>"
    text = prompt_with(0).partition(first)[0] + (
        f"{first}{QUESTION}{PLACEHOLDER}{second}assistant\nA picture.{second}user\n"
        f"{PLACEHOLDER}{second}assistant\n"
    )
    native = generate(
        server, text=text, image_data=[data_url(PNG), data_url(WEBP)], sampling_params=GREEDY
    )
    assert said(found) == native["text"]
    assert said(chat(server, [TEXT_PART, IMAGE_PART])) != answer


def test_a_second_question_about_the_same_picture_finds_its_prefix(server: ServerProcess) -> None:
    picture = data_url(encoded(noise(224, 224, seed=77)))
    body = {"image_data": picture, "sampling_params": GREEDY}
    first = generate(server, text=prompt_with(1, "How many?"), **body)
    assert first["meta_info"]["cached_tokens"] < 64
    second = generate(server, text=prompt_with(1, "Which colour?"), **body)
    assert second["meta_info"]["cached_tokens"] >= 64
    # Another picture of the same size and the same words have nothing in common but the beginning.
    other = {**body, "image_data": data_url(encoded(noise(224, 224, seed=78)))}
    assert (
        generate(server, text=prompt_with(1, "How many?"), **other)["meta_info"]["cached_tokens"]
        < 64
    )


def test_text_beside_pictures(server: ServerProcess) -> None:
    alone = generate(server, text="The mill", sampling_params=GREEDY)["text"]
    item = data_url(PNG)
    prompts = [prompt_with(1), "The mill"] * 4
    found = generate(server, text=prompts, image_data=[item, None] * 4, sampling_params=GREEDY)
    assert {each["text"] for each in found[1::2]} == {alone}
    assert len({each["text"] for each in found[::2]}) == 1


def test_pictures_that_are_no_rgb(server: ServerProcess) -> None:
    clear = noise(150, 120, "RGBA", seed=4)
    white = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    body = {"text": prompt_with(1), "sampling_params": GREEDY}
    texts = [
        generate(server, image_data=data_url(encoded(each)), **body)["text"]
        for each in (clear, white)
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["chat", "native", "language"])
def test_examples(server: ServerProcess, name: str) -> None:
    printed = run_example(f"{name}.py", server, "vision")
    assert len(printed.splitlines()) >= 2
