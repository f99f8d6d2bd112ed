"""`/parse_function_call` and `/separate_reasoning` take texts up to a length, and name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.native.parse import MAX_TEXT_LEN
from tests.support.fake_server import FakeServer

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
