"""Ollama's routes over a fake engine: lines, whole answers, prompts, refusals, the model's card."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.fake_engine import CHATML

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
THOUGHT = "<think>\nOne and two.\n</think>\n\nThree."
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
HELLO = [{"role": "user", "content": "Hello"}]
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def chat(front: Any, **fields: Any) -> httpx.Response:
    answer: httpx.Response = await front.post(
        "/api/chat", {"model": "m", "messages": HELLO, **fields}
    )
    return answer


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def without_times(line: dict[str, Any]) -> dict[str, Any]:
    assert all(line[name] >= 0 for name in DURATIONS)
    assert line["created_at"].endswith("Z")
    return {key: line[key] for key in line if key not in (*DURATIONS, "created_at")}


def prompt_of(front: Any) -> str:
    ids = np.frombuffer(front.engine.requests[-1].input_ids, dtype=np.int32)
    text: str = front.engine.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return text


@pytest.mark.parametrize("written", ["Hello", THOUGHT, f"Well.\n{CALL}\n{CALL}"])
async def test_lines_are_the_whole_answer(make_front: Any, written: str) -> None:
    front = make_front(lambda _: written, tools="hermes", reasoning="qwen3")
    whole = without_times((await chat(front, tools=TOOLS, stream=False)).json())
    # A stream is what one gets unless one says otherwise.
    *lines, last = lines_of(await chat(front, tools=TOOLS))
    assert len(lines) > 1
    assert not any(line["done"] for line in lines)
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        said = line["message"]
        assert said["role"] == "assistant"
        message["content"] += said["content"]
        for key, empty in (("thinking", ""), ("tool_calls", [])):
            if key in said:
                message[key] = message.get(key, empty) + said[key]
    assert {**without_times(last), "message": message} == whole
    assert whole["done"]
    assert whole["done_reason"] == "stop"
    assert whole["prompt_eval_count"] == len(front.engine.requests[0].input_ids) // 4
    calls = whole["message"].get("tool_calls", [])
    assert [call["function"]["arguments"] for call in calls] == [{"a": 1, "b": 2}] * (
        written.count(CALL)
    )


async def test_prompts(make_front: Any) -> None:
    front = make_front()
    asked = {"model": "m", "prompt": "Hello", "stream": False}
    answer = (await front.post("/api/generate", {**asked, "system": "Be brief."})).json()
    assert answer["response"] == "Hello"
    assert prompt_of(front) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    raw = (await front.post("/api/generate", {**asked, "raw": True})).json()
    assert (raw["response"], prompt_of(front)) == ("Hello", "Hello")
    lines = lines_of(await front.post("/api/generate", {"model": "m", "prompt": "Hello"}))
    assert "".join(line["response"] for line in lines) == "Hello"
    for path in ("/api/generate", "/api/chat"):
        nothing = (await front.post(path, {"model": "m"})).json()
        assert (nothing["done"], nothing["done_reason"]) == (True, "load")


async def test_options_reach_the_engine(make_front: Any) -> None:
    front = make_front()
    options = {"num_predict": 3, "seed": 7, "repeat_penalty": 1.5, "top_k": 4, "num_ctx": 4096}
    short = (await chat(front, options=options, stream=False)).json()
    assert (short["done_reason"], short["message"]["content"]) == ("length", "Hel")
    sampling = front.engine.requests[-1].spec.sampling
    assert (sampling.seed, sampling.repetition_penalty, sampling.top_k) == (7, 1.5, 4)
    for unbounded in (0, -1):
        whole = (await chat(front, options={"num_predict": unbounded}, stream=False)).json()
        assert (whole["done_reason"], whole["message"]["content"]) == ("stop", "Hello")
    stopped = (await chat(front, options={"stop": ["lo"], "num_predict": -1}, stream=False)).json()
    assert (stopped["done_reason"], stopped["message"]["content"]) == ("stop", "Hel")


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/api/chat", {"messages": [{"role": "nobody", "content": "a"}]}, "messages[0].role"),
        ("/api/chat", {"messages": HELLO, "format": "xml"}, "format must be"),
        ("/api/chat", {"messages": HELLO, "options": {"top_p": 7}}, "top_p"),
        ("/api/chat", {"messages": HELLO, "options": {"repeat_penalty": 3}}, "repeat_penalty"),
        (
            "/api/chat",
            {"messages": [{"role": "user", "content": "a", "images": ["x"]}]},
            "text only",
        ),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix is not supported"),
        ("/api/generate", {"prompt": "a", "images": ["x"]}, "text only"),
        ("/api/generate", {"prompt": 5}, "prompt"),
        ("/api/show", {}, "model must be given"),
    ],
)
async def test_refusals(make_front: Any, path: str, fields: dict[str, Any], words: str) -> None:
    front = make_front()
    refused = await front.post(path, {"model": "m", **fields} if path != "/api/show" else fields)
    assert refused.status_code == 400
    assert words in refused.json()["error"]
    assert not front.engine.requests


async def test_a_failure_ends_a_stream_with_a_line(make_front: Any) -> None:
    front = make_front()
    front.engine.fail_after = 2
    *_, failure = lines_of(await chat(front))
    assert failure["error"].startswith("The worker died")
    front.engine.fail_after = 0
    assert (await chat(front)).status_code == 503


@pytest.mark.parametrize("path", ["/api/embed", "/api/embeddings"])
async def test_a_model_that_generates_gives_no_vectors(make_front: Any, path: str) -> None:
    answer = await make_front().post(path, {"model": "m", "input": "a", "prompt": "a"})
    assert answer.status_code == 400
    assert "generates" in answer.json()["error"]


async def test_capabilities_are_the_models(make_front: Any) -> None:
    silent = make_front(template="{{ messages[0].content }}", tools="hermes")
    shown = (await silent.post("/api/show", {"model": "m"})).json()
    assert shown["capabilities"] == ["completion"]
    assert shown["template"] == "{{ messages[0].content }}"


async def test_the_model(make_front: Any) -> None:
    template = "{% if tools %}{{ tools }}{% endif %}" + CHATML
    front = make_front(template=template, tools="hermes", reasoning="qwen3")
    async with front.client() as client:
        (tag,) = (await client.get("/api/tags")).json()["models"]
        assert (await client.get("/api/ps")).json()["models"] == [tag]
        assert (await client.get("/api/version")).json()["version"]
    shown = (await front.post("/api/show", {"model": tag["name"]})).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["model_info"]["fake.context_length"] == 4096
