"""Stop strings end the answer but not the thoughts, on every wire, with the real scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from fastapi import FastAPI

from openai_api.chat_template import ChatTemplate
from openai_api.openai_context import OpenAIContext
from openai_api.parsers import ParserSet
from server.wire_routes import create_routers
from tests.support.fake_engine import CHATML
from tests.support.fake_service import fake_service
from tests.support.scripted_engine import ScriptedEngine

TURN = [{"role": "user", "content": "Hi"}]
THOUGHT = "the sum,\n\nthe sum"
# "sum" stands among the thoughts, and twice in the answer.
REPLY = f"<think>\n{THOUGHT}\n</think>\n\nIt is the sum. A sum."
WIRES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURN},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "m", "max_tokens": 99, "messages": TURN},
    "/api/chat": {"model": "m", "messages": TURN},
    "/api/generate": {"model": "m", "prompt": "Hi"},
}


def asked(path: str, stop: Any, **more: Any) -> dict[str, Any]:
    body = {**WIRES.get(path, {}), **more}
    if path.startswith("/api/"):
        return {**body, "options": {"stop": stop}}
    if path == "/v1/messages":
        return {**body, "stop_sequences": stop}
    return {**body, "stop": stop}


def made(folder: Path, reply: str, parser: str = "qwen3", tools: str | None = None) -> Any:
    folder.mkdir(exist_ok=True)
    engine = ScriptedEngine(folder, lambda _: reply)
    context = OpenAIContext(
        service=fake_service(engine),
        chat_template=ChatTemplate(CHATML),
        parsers=ParserSet.choose(parser, tools, engine.tokenizer),
    )
    app = FastAPI()
    for router in create_routers(context):
        app.include_router(router)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://front")


def said(path: str, answer: httpx.Response) -> tuple[str, str]:
    """Thoughts and answer of a whole or streamed answer."""
    assert answer.status_code == 200, answer.text
    thoughts, texts = [], []

    def walk(value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                walk(each)
        elif isinstance(value, dict):
            for key, each in value.items():
                if isinstance(each, str) and key in ("reasoning_content", "thinking"):
                    thoughts.append(each)
                elif isinstance(each, str) and key in ("content", "response", "text"):
                    (thoughts if value.get("type") == "reasoning_text" else texts).append(each)
                elif key == "delta" and isinstance(each, str):
                    is_thought = "reasoning" in value["type"]
                    (thoughts if is_thought else texts).append(each)
                else:
                    walk(each)

    if answer.headers["content-type"] == "application/json":
        body = answer.json()
        walk(body["output"] if path == "/v1/responses" else body)
        return "".join(thoughts), "".join(texts)
    for line in answer.text.split("\n"):
        line = line.removeprefix("data: ")
        if line.startswith("{"):
            event = orjson.loads(line)
            is_part = path != "/v1/responses" or event["type"].endswith("_text.delta")
            walk(event if is_part else None)
    return "".join(thoughts), "".join(texts)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", WIRES)
async def test_a_stop_ends_the_answer_alone(tmp_path: Path, path: str, stream: bool) -> None:
    async with made(tmp_path, REPLY) as client, asyncio.timeout(60):
        answer = await client.post(path, json=asked(path, ["sum", "\n\n"], stream=stream))
    assert said(path, answer) == (THOUGHT, "It is the ")


@pytest.mark.parametrize(
    ("fields", "content"),
    [
        ({"stop_regex": "s.m"}, "It is the "),
        ({"stop_regex": ["^I.", "sum"]}, ""),
        ({"stop": "sum", "no_stop_trim": True}, "It is the sum"),
        # With the tags of thoughts, which are tokens here.
        ({"stop": "sum", "min_tokens": 36}, "It is the sum. A "),
        ({"stop": "sum", "separate_reasoning": False}, "<think>\nthe "),
    ],
)
async def test_stops_of_chat(tmp_path: Path, fields: dict[str, Any], content: str) -> None:
    path = "/v1/chat/completions"
    async with made(tmp_path, REPLY) as client, asyncio.timeout(60):
        answer = await client.post(path, json={**WIRES[path], **fields})
    assert said(path, answer)[1] == content
    least = fields.get("min_tokens", 0)
    assert answer.json()["usage"]["completion_tokens"] > least
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_plain_completions_are_looked_through_whole(tmp_path: Path, stream: bool) -> None:
    path = "/v1/completions"
    body = {"prompt": "Hi", "max_tokens": 99, "stop": "sum", "stream": stream}
    async with made(tmp_path, REPLY) as client, asyncio.timeout(60):
        answer = await client.post(path, json=body)
    assert said(path, answer)[1] == "<think>\nthe "


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "stops",
    [
        {"stop": ["b"]},
        {"stop_regex": ["b+"]},
        {"stop": ["b"], "stop_regex": ["[bc]"]},
        {"stop": ["abc"], "stop_regex": ["b"]},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_stops_wait_for_the_least_tokens(
    tmp_path: Path, route: str, stops: dict[str, Any], stream: bool
) -> None:
    body = {"prompt": "Hi"} if route == "/v1/completions" else {"messages": TURN}
    body |= {**stops, "stream": stream, "max_tokens": 20}
    reply = "abab" * 4
    for least, text in ((0, "a"), (1, "a"), (2, "aba"), (3, "aba"), (4, "ababa")):
        async with made(tmp_path / str(least), reply) as client, asyncio.timeout(60):
            answer = await client.post(route, json={**body, "min_tokens": least})
        assert said(route, answer)[1] == text


async def test_a_stop_ends_a_message_of_channels(tmp_path: Path) -> None:
    reply = (
        "<|channel|>analysis<|message|>the sum<|end|><|start|>assistant"
        "<|channel|>final<|message|>final: the sum"
    )
    path = "/v1/chat/completions"
    for stop, content in ((["sum", "assistant"], "final: the "), (["final"], "")):
        async with made(tmp_path / stop[0], reply, "gpt-oss") as client, asyncio.timeout(60):
            answer = await client.post(path, json=asked(path, stop))
        assert said(path, answer) == ("the sum", content)
