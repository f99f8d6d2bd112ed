"""`/parse_function_call` and `/separate_reasoning` take texts up to a length, and name it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from server.native.parse import MAX_AT_ONCE, MAX_TEXT_LEN
from tests.support.fake_server import FakeServer
from tests.support.model_outputs import CALL_WRITERS, TOOL_OUTPUTS

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "f")]


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/separate_reasoning", {"reasoning_parser": "qwen3"}),
        ("/parse_function_call", {"tool_call_parser": "hermes", "tools": TOOLS}),
    ],
)
async def test_a_text_that_is_too_long_is_refused(
    tmp_path: Path, path: str, more: dict[str, object]
) -> None:
    server = FakeServer(tmp_path)
    refused = await server.client.post(path, json={"text": "a" * (MAX_TEXT_LEN + 1), **more})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert str(MAX_TEXT_LEN) in message
    assert str(MAX_TEXT_LEN + 1) in message
    taken = await server.client.post(path, json={"text": "a" * MAX_TEXT_LEN, **more})
    assert taken.status_code == 200


async def test_many_calls_and_a_name_that_is_there_twice(tmp_path: Path) -> None:
    server = FakeServer(tmp_path)
    call = '<tool_call>{"name": "%s"}</tool_call>'
    text = (call % "g" + call % "f") * 10_000
    answer = await server.client.post(
        "/parse_function_call", json={"text": text, "tools": TOOLS, "tool_call_parser": "hermes"}
    )
    calls = answer.json()["calls"]
    assert len(calls) == 20_000
    assert calls[:2] == [
        {"tool_index": 1, "name": "g", "parameters": "{}"},
        {"tool_index": 0, "name": "f", "parameters": "{}"},
    ]


PATH = "/parse_function_call"
PYTHONIC: dict[str, Any] = {"tools": TOOLS, "tool_call_parser": "pythonic"}
MANY = f"[{', '.join(['f(a=1)'] * 40_000)}]"


def asked(path: str, body: bytes) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 1),
        "client": ("127.0.0.1", 2),
        "http_version": "1.1",
    }


async def test_a_text_ends_with_its_client(tmp_path: Path) -> None:
    server = FakeServer(tmp_path)
    body = orjson.dumps({"text": MANY, **PYTHONIC})
    parts = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    started = time.process_time()
    await server.app(asked(PATH, body), receive, send)
    took_s = time.process_time() - started
    assert sent[0]["status"] == 499
    started = time.process_time()
    whole = await server.client.post(PATH, content=body)
    assert len(whole.json()["calls"]) == 40_000
    assert took_s < (time.process_time() - started) / 2


async def test_short_texts_take_turns_with_long_ones(tmp_path: Path) -> None:
    server = FakeServer(tmp_path)
    post = server.client.post
    long = [asyncio.create_task(post(PATH, json={"text": MANY, **PYTHONIC})) for _ in range(3)]
    for _ in range(3):
        short = await post(PATH, json={"text": "[f(a=1)]", **PYTHONIC})
        assert len(short.json()["calls"]) == 1
    assert not any(task.done() for task in long)
    for task in long:
        task.cancel()
    await asyncio.gather(*long, return_exceptions=True)
    # What was given up holds no place.
    answers = await asyncio.gather(
        *(post(PATH, json={"text": "[f(a=1)]", **PYTHONIC}) for _ in range(MAX_AT_ONCE + 1))
    )
    statuses = [answer.status_code for answer in answers]
    assert statuses == [200] * MAX_AT_ONCE + [503]


@pytest.mark.parametrize("parser", TOOL_OUTPUTS)
async def test_a_slice_is_no_border(tmp_path: Path, parser: str) -> None:
    server = FakeServer(tmp_path)
    calls = [("now", {})] * 400
    text = CALL_WRITERS[parser](calls)
    tools = [{"type": "function", "function": {"name": "now"}}]
    body = {"text": text, "tools": tools, "tool_call_parser": parser}
    found = (await server.client.post(PATH, json=body)).json()
    assert [call["name"] for call in found["calls"]] == ["now"] * 400
    assert not found["normal_text"].strip()
