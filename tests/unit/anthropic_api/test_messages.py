"""`/v1/messages` over a fake engine: prompts, blocks, events, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.fake_server import FakeServer

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
THOUGHT = "<think>\nOne and two.\n</think>\n\nThree."
TOOLS = [{"name": "add", "description": "Adds", "input_schema": {"type": "object"}}]
HELLO = [{"role": "user", "content": "Hello"}]


async def ask(front: Any, content: Any = "Hello", **fields: Any) -> httpx.Response:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    body = {"model": "m", "max_tokens": 1000, "messages": messages, **fields}
    answer: httpx.Response = await front.post("/v1/messages", body)
    return answer


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Decode a stream; each event's name is checked to be its type."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    is_open = False
    texts: list[str] = []
    for event in events[2:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            texts, is_open = [], True
            continue
        assert is_open
        block = message["content"][event["index"]]
        if event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            kind = delta.pop("type")
            (text,) = delta.values()
            if kind == "signature_delta":
                block["signature"] = text
            else:
                texts.append(text)
        else:
            is_open = False
            whole = "".join(texts)
            if block["type"] == "tool_use":
                block["input"] = json.loads(whole)
            else:
                block[block["type"]] = whole
    assert not is_open
    return {**message, **events[-2]["delta"], "usage": events[-2]["usage"]}


def prompt_of(front: Any) -> str:
    ids = np.frombuffer(front.engine.requests[-1].input_ids, dtype=np.int32)
    text: str = front.engine.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return text


async def test_a_whole_answer(make_front: Any) -> None:
    front = make_front()
    answer = await ask(front)
    assert answer.status_code == 200, answer.text
    message = answer.json()
    assert message.pop("id").startswith("msg_")
    usage = message.pop("usage")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }
    assert usage["input_tokens"] == len(front.engine.requests[0].input_ids) // 4
    assert usage["output_tokens"] == len("Hello") + 1
    assert (usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]) == (0, 0)


@pytest.mark.parametrize(
    ("written", "options"),
    [
        ("Hello", {}),
        (THOUGHT, {"reasoning": "qwen3"}),
        (f"Let me see.\n{CALL}\n{CALL}", {"tools": "hermes"}),
        (f"<think>\nHm.\n</think>\n\n{CALL}", {"tools": "hermes", "reasoning": "qwen3"}),
        ("", {}),
    ],
    ids=["text", "thoughts", "calls", "thoughts and a call", "nothing"],
)
async def test_a_stream_is_the_whole_answer(
    make_front: Any, written: str, options: dict[str, Any]
) -> None:
    front = make_front(lambda _: written, **options)
    fields = {"tools": TOOLS} if "tools" in options else {}
    whole = (await ask(front, **fields)).json()
    streamed = put_together(events_of(await ask(front, stream=True, **fields)))
    calls = [block for block in whole["content"] if block["type"] == "tool_use"]
    for message in (whole, streamed):
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole
    assert [block["input"] for block in calls] == [{"a": 1, "b": 2}] * written.count(CALL)
    assert whole["stop_reason"] == ("tool_use" if calls else "end_turn")
    thoughts = [each["thinking"] for each in whole["content"] if each["type"] == "thinking"]
    assert len(thoughts) == written.count("<think>")
    assert "<think>" not in json.dumps(whole)


async def test_the_end(make_front: Any) -> None:
    front = make_front()
    short = (await ask(front, "Hello there", max_tokens=3)).json()
    assert (short["stop_reason"], short["stop_sequence"]) == ("max_tokens", None)
    for stream in (False, True):
        answer = await ask(front, "Hello there", stop_sequences=["lo"], stream=stream)
        stopped = put_together(events_of(answer)) if stream else answer.json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo")
        assert stopped["content"] == [{"type": "text", "text": "Hel"}]


async def test_more_may_be_asked_for_than_fits(make_front: Any) -> None:
    front = make_front(lambda _: "y" * 5000)
    for stream in (False, True):
        # As coding agents ask whatever the model is.
        answer = await ask(front, max_tokens=32_000, stream=stream)
        cut = put_together(events_of(answer)) if stream else answer.json()
        assert cut["stop_reason"] == "model_context_window_exceeded"
        usage = cut["usage"]
        assert usage["input_tokens"] + usage["output_tokens"] == 4096
    too_long = await ask(front, "x" * 5000)
    assert too_long.status_code == 400
    assert too_long.json()["error"]["message"].startswith("prompt is too long: ")


async def test_thoughts_may_be_left_out_and_come_back(make_front: Any) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}|{{ m.content }}{% endfor %}"
    front = make_front(lambda _: THOUGHT, template=template, reasoning="qwen3")
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    for stream in (False, True):
        answer = await ask(front, "Count", thinking=thinking, stream=stream)
        message = put_together(events_of(answer)) if stream else answer.json()
        thought, text = message["content"]
        assert (thought["thinking"], text["text"]) == ("", "Three.")
        turn = {"role": "assistant", "content": message["content"]}
        await ask(front, [{"role": "user", "content": "Count"}, turn, *HELLO])
        assert "One and two.|Three." in prompt_of(front)
    # Another server's signature says nothing here.
    strange = {"role": "assistant", "content": [{**thought, "signature": "AAAA"}, text]}
    await ask(front, [{"role": "user", "content": "Count"}, strange, *HELLO])
    assert "One and two" not in prompt_of(front)


async def test_a_conversation_reaches_the_template(make_front: Any) -> None:
    front = make_front()
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Add"}, {"type": "text", "text": "1"}],
        },
        {"role": "user", "content": "and 2"},
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "I add."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"},
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_2",
                    "content": "no",
                    "is_error": True,
                },
                {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1f2;"},
        {"type": "text", "text": "Be brief."},
    ]
    assert (await ask(front, messages, system=system)).status_code == 200
    said = [part.partition("<|im_end|>")[0] for part in prompt_of(front).split("<|im_start|>")[1:]]
    assert said == [
        "system\nBe brief.",
        "user\nAdd\n1\nand 2",
        "assistant\nI add.",
        "tool\n3",
        "tool\nError: no",
        "user\nWell?",
        "assistant\n",
    ]


async def test_a_schema_with_null_keys(make_front: Any) -> None:
    schema = {"type": "object", "properties": None, "required": None}
    body = {"model": "m", "max_tokens": 5, "messages": HELLO}
    for given in (TOOLS[0]["input_schema"], schema):
        front = make_front(template="{{ tools | tojson }}")
        tools = [{"name": "add", "description": "Adds", "input_schema": given}]
        answer = await front.post("/v1/messages", {**body, "tools": tools})
        assert answer.status_code == 200, answer.text
        assert "null" not in prompt_of(front)


async def test_a_begun_answer_goes_on(make_front: Any) -> None:
    front = make_front(lambda _: "lo")
    begun = [*HELLO, {"role": "assistant", "content": "Hel"}]
    answer = await ask(front, begun)
    assert prompt_of(front).endswith("<|im_start|>assistant\nHel")
    assert answer.json()["content"] == [{"type": "text", "text": "lo"}]


async def test_tokens_are_counted_as_they_are_used(make_front: Any) -> None:
    front = make_front(tools="hermes")
    fields: dict[str, Any] = {"system": "Be brief.", "tools": TOOLS}
    body = {"model": "m", "messages": HELLO, **fields}
    counted = await front.post("/v1/messages/count_tokens", body)
    assert counted.status_code == 200, counted.text
    assert not front.engine.requests
    used = (await ask(front, **fields)).json()["usage"]["input_tokens"]
    assert counted.json() == {"input_tokens": used}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": []}, "messages cannot be empty"),
        ({"messages": [{"role": "user", "content": []}]}, r"messages[0].content must not be empty"),
        ({"messages": [{"role": "assistant", "content": []}]}, "messages have no content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]: this model takes text only",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            "messages[0].content[0]: Object missing required field `type`",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "add"}]}
                ]
            },
            "messages[0].content[0]: a block of this type cannot be in a message of the user",
        ),
        ({"tools": [{"type": "web_search_20260101", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "mcp_toolset"}]}, "one of Anthropic's own tools"),
        ({"tools": [{"input_schema": {"type": "object"}}]}, "tools[0].name must be given"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema must be given"),
        ({"tools": [{"name": "add", "input_schema": None}]}, "tools[0].input_schema must be given"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0]: Object missing required field `text`",
        ),
        (
            {"tools": [{"name": "add", "input_schema": {"type": 5}}]},
            "tools[0].input_schema",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice needs a name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice names"),
        ({"mcp_servers": [{"url": "http://a"}]}, "mcp_servers is not supported"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "enabled", "display": "sometimes"}}, "thinking.display"),
    ],
)
async def test_refusals(make_front: Any, fields: dict[str, Any], words: str) -> None:
    front = make_front(tools="hermes")
    body = {"model": "m", "max_tokens": 5, "messages": HELLO, **fields}
    refused = await front.post("/v1/messages", body)
    assert refused.status_code == 400
    error = refused.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert words in error["error"]["message"]
    assert not front.engine.requests


async def test_a_failure_ends_a_stream_with_an_event(make_front: Any) -> None:
    front = make_front()
    front.engine.fail_after = 2
    *_, text, failure = events_of(await ask(front, stream=True))
    assert text["type"] == "content_block_delta"
    assert failure["type"] == "error"
    assert failure["error"]["type"] == "overloaded_error"
    assert failure["error"]["message"].startswith("The worker died")
    front.engine.fail_after = 0
    for stream in (False, True):
        refused = await ask(front, stream=stream)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert refused.json()["error"]["type"] == "overloaded_error"


async def test_other_refusals_speak_the_same(tmp_path: Path) -> None:
    server = FakeServer(tmp_path, api_key="secret")
    body = {"model": "m", "max_tokens": 5, "messages": HELLO}
    refused = await server.client.post("/v1/messages", json=body)
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"
    keys = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    answer = await server.client.post("/v1/messages", json=body, headers=keys)
    assert answer.status_code == 200
    for method, status in (("GET", 405), ("POST", 400)):
        plain = {**keys, "content-type": "text/plain"}
        refused = await server.client.request(method, "/v1/messages", headers=plain, content=b"{}")
        assert refused.status_code == status
        assert refused.json()["type"] == "error"
