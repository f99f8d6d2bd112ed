"""Parses event streams with the types of the official client packages, and checks their order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from anthropic.types import RawMessageStreamEvent
from jiter import from_json
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

# An answer that was built from its events, and the answer's usage.
Answered = tuple[dict[str, Any], dict[str, Any]]
_RESPONSES: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_MESSAGES: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def read_responses(
    text: str, *, is_cut: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the completed items of a stream of `/v1/responses`, and the usage."""
    events = list(named_events(text))
    for event in events:
        _RESPONSES.validate_python(event)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{'incomplete' if is_cut else 'completed'}", events[-1]
    done: list[dict[str, Any]] = []
    open_item: str | None = None
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_item is None, "two items are open"
            assert event["output_index"] == len(done)
            open_item = event["item"]["id"]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == open_item, "another item ends"
            open_item = None
            done.append(event["item"])
        else:
            assert event["item_id"] == open_item, f"{kind} of an item that is not open"
    assert open_item is None
    response = events[-1]["response"]
    assert response["output"] == done
    return done, response["usage"]


def read_messages(text: str, *, is_cut: bool = False) -> Answered:
    """Return the message that a stream of `/v1/messages` builds, and the usage."""
    events = [event for event in named_events(text) if event["type"] != "ping"]
    for event in events:
        _MESSAGES.validate_python(event)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"], events[-1]
    message = events[0]["message"]
    blocks: list[dict[str, Any]] = message["content"]
    parts: dict[str, str] = {}
    for event in events[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(blocks), "blocks are out of order"
            blocks.append(event["content_block"])
            parts = {}
        elif kind == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            for key, piece in event["delta"].items():
                parts[key] = parts.get(key, "") + piece if key != "type" else piece
        else:
            assert (kind, event["index"]) == ("content_block_stop", len(blocks) - 1)
            _fill(blocks[-1], parts)
    called = any(block["type"] == "tool_use" for block in blocks)
    reason = "max_tokens" if is_cut else "tool_use" if called else "end_turn"
    assert events[-2]["delta"]["stop_reason"] == reason
    return message, events[-2]["usage"]


def read_chat(text: str, *, is_cut: bool = False) -> Answered:
    """Return the message that a stream of `/v1/chat/completions` builds, and the usage."""
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    chunks = [json.loads(block.removeprefix("data: ")) for block in blocks]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    last = chunks.pop()
    assert last["choices"] == []
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for part in delta.get("tool_calls", ()):
            if part.get("id"):
                assert part["index"] == len(message["tool_calls"])
                message["tool_calls"].append({**part, "function": dict(part["function"])})
            else:
                function = message["tool_calls"][part["index"]]["function"]
                function["arguments"] += part["function"]["arguments"]
    reason = chunks[-1]["choices"][0]["finish_reason"]
    assert reason == ("length" if is_cut else "tool_calls" if message["tool_calls"] else "stop")
    return message, last["usage"]


def _fill(block: dict[str, Any], parts: dict[str, str]) -> None:
    match block["type"]:
        case "text":
            block["text"] = parts["text"]
        case "thinking":
            block |= {"thinking": parts["thinking"], "signature": parts["signature"]}
        case "tool_use":
            # The official client also parses incomplete JSON.
            block["input"] = from_json(parts["partial_json"].encode(), partial_mode=True)


def named_events(text: str) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream in which each event has a name."""
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event
