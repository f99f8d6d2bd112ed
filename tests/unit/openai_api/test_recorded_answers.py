"""Recorded outputs through HTTP: streams of any step say what the whole answer says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jiter import from_json

from openai_api.call_arguments import arguments_object
from tests.support.model_outputs import BOTH, FUNCTIONS, TOOL_OUTPUTS, Recorded

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in FUNCTIONS.items()
]
CASES: list[tuple[str | None, str, Recorded]] = [
    *((None, name, each) for name, outputs in TOOL_OUTPUTS.items() for each in outputs[:2]),
    *((reasoning, tools, each) for (reasoning, tools), each in BOTH.items()),
]
IDS = [f"{reasoning}-{tools}" for reasoning, tools, _ in CASES]


def joined(chunks: list[Any]) -> dict[str, Any]:
    """What a client has in the end: texts and calls put together, as OpenAI's own does."""
    content, reasoning, calls = "", "", []
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or ():
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append({"name": part["function"]["name"], "arguments": ""})
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    reason = chunks[-1]["choices"][0]["finish_reason"]
    return {"content": content, "reasoning": reasoning, "calls": calls, "reason": reason}


@pytest.mark.parametrize(("reasoning", "tools", "recorded"), CASES, ids=IDS)
async def test_streams_equal_the_whole_answer(
    make_front: Any, events: Any, reasoning: str | None, tools: str, recorded: Recorded
) -> None:
    for step_tokens in (1, 4, 33):
        front = make_front(
            lambda _: recorded.text,
            reasoning=reasoning,
            tools=tools,
            engine_options={"step_tokens": step_tokens},
        )
        answer = (await front.chat(tools=TOOLS)).json()
        message, reason = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
        functions = [call["function"] for call in message.get("tool_calls", [])]
        assert [(each["name"], json.loads(each["arguments"])) for each in functions] == (
            recorded.calls
        )
        assert reason == ("tool_calls" if recorded.calls else "stop")
        options = {"include_usage": True, "continuous_usage_stats": False}
        streamed = events(await front.chat(tools=TOOLS, stream=True, stream_options=options))
        assert joined(streamed[:-1]) == {
            "content": message["content"] or "",
            "reasoning": message["reasoning_content"] or "",
            "calls": functions,
            "reason": reason,
        }
        assert streamed[-1]["usage"] == answer["usage"]
        counts = bool(recorded.reasoning)
        assert (answer["usage"]["reasoning_tokens"] > 0) == counts


@pytest.mark.parametrize(("reasoning", "tools", "recorded"), CASES[-7:], ids=IDS[-7:])
async def test_reasoning_that_is_held_or_left_in(
    make_front: Any, events: Any, reasoning: str | None, tools: str, recorded: Recorded
) -> None:
    front = make_front(lambda _: recorded.text, reasoning=reasoning, tools=tools)
    held = events(await front.chat(tools=TOOLS, stream=True, stream_reasoning=False))
    pieces = [chunk["choices"][0]["delta"].get("reasoning_content") for chunk in held]
    assert [piece.strip() for piece in pieces if piece] == [recorded.reasoning]
    left = (await front.chat(separate_reasoning=False)).json()["choices"][0]["message"]
    assert left["content"] == recorded.text
    assert left["reasoning_content"] is None


@pytest.mark.parametrize("step_tokens", [1, 9])
async def test_other_wires_stream_arguments_too(
    make_front: Any, events: Any, step_tokens: int
) -> None:
    recorded = TOOL_OUTPUTS["hermes"][1]
    options = {"step_tokens": step_tokens}
    front = make_front(lambda _: recorded.text, tools="hermes", engine_options=options)
    tools = [
        {"name": name, "input_schema": schema, "description": ""}
        for name, schema in FUNCTIONS.items()
    ]
    messages = [{"role": "user", "content": "Go"}]
    body = {"model": "m", "max_tokens": 2000, "messages": messages, "tools": tools}
    whole = (await front.post("/v1/messages", body)).json()
    blocks = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert [(block["name"], block["input"]) for block in blocks] == recorded.calls
    answer = await front.post("/v1/messages", {**body, "stream": True})
    parts: dict[int, list[str]] = {}
    for line in answer.text.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: ") else {}
        if event.get("delta", {}).get("type") == "input_json_delta":
            parts.setdefault(event["index"], []).append(event["delta"]["partial_json"])
    assert all(len(pieces) > 1 for pieces in parts.values())
    assert [json.loads("".join(pieces)) for pieces in parts.values()] == [
        given for _, given in recorded.calls
    ]
    functions = [
        {"type": "function", "name": name, "parameters": FUNCTIONS[name]} for name in FUNCTIONS
    ]
    answer = await front.post("/v1/responses", {"input": "Go", "tools": functions, "stream": True})
    told: dict[str, str] = {}
    for line in answer.text.splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        if event.get("type") == "response.function_call_arguments.delta":
            told[event["item_id"]] = told.get(event["item_id"], "") + event["delta"]
        elif event.get("type") == "response.function_call_arguments.done":
            assert told[event["item_id"]] == event["arguments"]
    assert [json.loads(each) for each in told.values()] == [given for _, given in recorded.calls]


async def test_a_call_that_is_cut_off_stays_unfinished(make_front: Any, events: Any) -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {"query": "abc", "limit": 12345'
    front = make_front(lambda _: text + "678}}</tool_call>", tools="hermes")
    # The tag is one token.
    limit = len(text) - 10
    answer = (await front.chat(tools=TOOLS, max_tokens=limit - 10)).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"query": "abc", "lim'
    assert not answer["message"]["content"]
    body = {"model": "m", "max_tokens": limit - 8, "messages": [{"role": "user", "content": "Go"}]}
    tools = [{"name": name, "input_schema": FUNCTIONS[name]} for name in FUNCTIONS]
    whole = (await front.post("/v1/messages", {**body, "tools": tools})).json()
    assert whole["stop_reason"] == "max_tokens"
    # What is complete of it, as Anthropic's client has it from a stream.
    assert whole["content"][0]["input"] == {"query": "abc"}
    body = {"model": "m", "messages": body["messages"], "tools": TOOLS, "stream": False}
    line = (await front.post("/api/chat", {**body, "options": {"num_predict": limit - 8}})).json()
    assert line["message"]["tool_calls"][0]["function"]["arguments"] == {"query": "abc"}


@pytest.mark.parametrize("given", ['{"query": NaN}', '{"query": ' * 5000 + "1" + "}" * 5000])
async def test_a_call_is_told_as_it_was_written(make_front: Any, events: Any, given: str) -> None:
    """Deeper than most clients read, or not JSON: no wire cuts it off, and it comes back."""
    text = f'<tool_call>\n{{"name": "search", "arguments": {given}}}\n</tool_call>'
    options = {"context_len": 2**18, "step_tokens": 500}
    front = make_front(lambda _: text, tools="hermes", engine_options=options)
    answer = (await front.chat(tools=TOOLS)).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["arguments"], answer["message"]["content"]) == (given, None)
    chunks = events(await front.chat(tools=TOOLS, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(part["function"]["arguments"] for part in parts) == given
    asked = {"role": "user", "content": "Go"}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    again = {"messages": [asked, answer["message"], result]}
    assert (await front.post("/v1/chat/completions", again)).status_code == 200

    functions = [
        {"type": "function", "name": name, "parameters": FUNCTIONS[name]} for name in FUNCTIONS
    ]
    response = (await front.post("/v1/responses", {"input": "Go", "tools": functions})).json()
    (item,) = response["output"]
    assert item["arguments"] == given
    output = {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
    again = {"input": [asked, item, output]}
    assert (await front.post("/v1/responses", again)).status_code == 200

    tools = [{"name": name, "input_schema": FUNCTIONS[name]} for name in FUNCTIONS]
    body = {"model": "m", "max_tokens": 2**17, "messages": [asked], "tools": tools}
    whole = (await front.post("/v1/messages", body)).json()
    (block,) = whole["content"]
    assert whole["stop_reason"] == "tool_use"
    streamed = (await front.post("/v1/messages", {**body, "stream": True})).text
    data = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: ")]
    deltas = [each.get("delta", {}) for each in data]
    partial = "".join(delta.get("partial_json", "") for delta in deltas)
    # As Anthropic's client reads it.
    assert from_json(partial.encode(), partial_mode=True) == block["input"]
    assert block["input"] == ({"query": "NaN"} if "NaN" in given else arguments_object(given))
    body = {"model": "m", "messages": [asked], "tools": TOOLS}
    line = (await front.post("/api/chat", {**body, "stream": False})).json()
    lines = [json.loads(each) for each in (await front.post("/api/chat", body)).text.splitlines()]
    for said in (line, lines[0]):
        (called,) = said["message"]["tool_calls"]
        assert called["function"]["arguments"] == block["input"]
