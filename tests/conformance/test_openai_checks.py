"""Checks 36 to 48 of the API's contract, one test each, over HTTP.

The general decisions of the contract hold too: ids have OpenAI's prefixes, and errors have both
shapes. Check 47 is about images and needs a vision model.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from tests.support.grammar_backends import needs_grammars
from tests.support.server import ServerProcess, demo_server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "Where is the mill?"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": CITY}}
    for name in ("weather", "time")
]


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    # The demo model: one of noise would write white space in its JSON up to the limit.
    return demo_server()


def post(server: ServerProcess, path: str, status: int = 200, **body: Any) -> Any:
    answer = server.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def chat(server: ServerProcess, status: int = 200, **body: Any) -> Any:
    return post(
        server, CHAT, status, **{"messages": ASK, "temperature": 0, "max_tokens": 8, **body}
    )


def streamed(url: str, **body: Any) -> list[Any]:
    asked = {"messages": ASK, "temperature": 0, "max_tokens": 8, **body, "stream": True}
    answer = httpx.post(f"{url}{CHAT}", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    *events, end, rest = answer.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def test_36_head_of_a_chat(server: ServerProcess) -> None:
    answer = chat(server, model="whatever/it:is")
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", answer["id"])
    assert answer["model"] == "whatever/it:is"
    assert "matched_stop" in answer["choices"][0]
    assert answer["metadata"]["weight_version"] == "default"
    assert chat(server, rid="mine")["id"] == "mine"


def test_37_limits_of_completions(server: ServerProcess) -> None:
    asked = {"prompt": "The wheel", "ignore_eos": True, "temperature": 0}
    assert post(server, TEXT, **asked)["usage"]["completion_tokens"] == 16
    post(server, TEXT, 400, **asked, max_tokens=0)
    echoed = post(server, TEXT, **asked, echo=True, logprobs=0)["choices"][0]
    assert echoed["text"].startswith("The wheel")
    values = echoed["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert len(values) > 16
    assert echoed["logprobs"]["top_logprobs"] is None


def test_38_prompts_and_choices(server: ServerProcess) -> None:
    answer = post(server, TEXT, prompt=["The wheel", "A"], n=2, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    alone = [
        post(server, TEXT, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens"]
        for prompt in ("The wheel", "A")
    ]
    assert answer["usage"]["prompt_tokens"] == sum(alone)


def test_39_order_of_a_stream(server: ServerProcess) -> None:
    content = chat(server)["choices"][0]["message"]["content"]
    chunks = streamed(server.url, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert (deltas[0]["role"], deltas[0]["content"]) == ("assistant", "")
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert not any(deltas[-1].values())
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 8
    assert not any("usage" in chunk for chunk in streamed(server.url))


@needs_grammars
def test_40_response_formats(server: ServerProcess) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    answer = chat(server, response_format=schema, max_tokens=300)
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Oslo", "Rome")
    answer = chat(server, response_format={"type": "json_object"}, max_tokens=300)
    assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)
    error = chat(server, 400, response_format={"type": "json_schema"})
    assert error["param"] == "response_format"


def test_41_bodies_that_are_refused(server: ServerProcess) -> None:
    for body in ({}, {"messages": []}, {"messages": "Hi"}, {"messages": [1]}, {"messages": None}):
        error = post(server, CHAT, 400, **body)
        assert error["object"] == "error"
        assert error["error"]["message"] == error["message"]
        assert error["code"] == 400
    text = {"content-type": "text/plain"}
    assert server.client.post(CHAT, content="{}", headers=text).status_code == 400


@needs_grammars
def test_42_tool_choice(server: ServerProcess) -> None:
    asked = {"tools": TOOLS, "max_tokens": 300}
    for choice, names in (("required", {"weather", "time"}), ("time", {"time"})):
        named = {"type": "function", "function": {"name": choice}}
        answer = chat(
            server,
            **asked,
            tool_choice=choice if choice == "required" else named,
            parallel_tool_calls=False,
        )
        (choice_made,) = answer["choices"]
        assert choice_made["finish_reason"] == "tool_calls"
        (call,) = choice_made["message"]["tool_calls"]
        assert re.fullmatch("call_[0-9a-f]{24}", call["id"])
        assert call["function"]["name"] in names
        assert json.loads(call["function"]["arguments"])["city"] in ("Oslo", "Rome")
    unknown = {"type": "function", "function": {"name": "else"}}
    assert chat(server, 400, **asked, tool_choice=unknown)["param"] == "tool_choice"
    assert chat(server, 400, tool_choice="required")["param"] == "tool_choice"


@needs_grammars
def test_43_streamed_calls(server: ServerProcess) -> None:
    chunks = streamed(
        server.url,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
    )
    parts = [
        part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert [part["function"].get("name") is None for part in parts] == [
        False,
        *[True] * (len(parts) - 1),
    ]
    assert {part["index"] for part in parts} == {0}
    arguments = "".join(part["function"]["arguments"] for part in parts)
    assert json.loads(arguments)["city"] in ("Oslo", "Rome")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_44_thoughts(fake_api: Any) -> None:
    # It says what it is asked.
    said = "<think>\nhm, hm\n</think>\n\nYes."
    body = {"messages": [{"role": "user", "content": said}], "max_tokens": 99}

    def message(**more: Any) -> Any:
        answer = httpx.post(f"{fake_api.url}{CHAT}", json={**body, **more}).json()
        return answer["choices"][0]["message"]

    assert (message()["reasoning_content"], message()["content"]) == ("hm, hm", "Yes.")
    raw = message(separate_reasoning=False)
    assert (raw["content"], raw["reasoning_content"]) == (said, None)
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(fake_api.url, **body)]
    assert "".join(delta["reasoning_content"] or "" for delta in deltas) == "hm, hm"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    assert not any(delta.get("content") and delta["reasoning_content"] for delta in deltas)


def test_45_logprobs(server: ServerProcess) -> None:
    choice = chat(server, logprobs=True, top_logprobs=3)["choices"][0]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 8
    for entry in entries:
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"], abs=1e-3)


def test_46_cached_tokens(server: ServerProcess, fake_api: Any) -> None:
    first = chat(server)["usage"]["prompt_tokens_details"]
    assert isinstance(first["cached_tokens"], int)
    quiet = httpx.post(f"{fake_api.url}{CHAT}", json={"messages": ASK}).json()
    assert quiet["usage"]["prompt_tokens_details"] is None


def test_48_messages(server: ServerProcess) -> None:
    path, body = "/v1/messages", {"model": "m", "messages": ASK, "max_tokens": 4}
    whole = post(server, path, **body)
    assert (whole["type"], whole["stop_reason"]) == ("message", "max_tokens")
    answer = server.client.post(path, json={**body, "stream": True})
    names = re.findall("^event: (.*)$", answer.text, re.MULTILINE)
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) <= {"content_block_delta", "ping"}
    assert "[DONE]" not in answer.text
    del body["max_tokens"]
    error = post(server, path, 400, **body)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
