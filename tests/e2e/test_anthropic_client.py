"""The official Anthropic client against the demo model: text, thoughts, tools, streams, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.support.grammar_backends import needs_grammars
from tests.support.server import ServerProcess, demo_server

CAPITAL = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def server() -> ServerProcess:
    return demo_server()


@pytest.fixture
def client(server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def asked(*messages: Any, **fields: Any) -> dict[str, Any]:
    said = [each if isinstance(each, dict) else user(each) for each in messages]
    # Newer clients have no field for it.
    return {
        "model": "demo",
        "max_tokens": 300,
        "messages": said,
        "extra_body": {"temperature": 0},
        **fields,
    }


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def streamed(client: anthropic.Anthropic, **request: Any) -> Any:
    with client.messages.stream(**request) as stream:
        return stream.get_final_message()


def test_text_whole_and_streamed(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**asked(CAPITAL))
    assert "Paris" in text_of(whole)
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    with client.messages.stream(**asked(CAPITAL)) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1
    assert "".join(pieces) == text_of(final) == text_of(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    # The second time it lies in the cache, and is counted there.
    assert final.usage.cache_read_input_tokens
    assert (
        final.usage.input_tokens + final.usage.cache_read_input_tokens
        == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        == client.messages.count_tokens(model="demo", messages=[user(CAPITAL)]).input_tokens
    )


def test_thoughts_have_blocks_of_their_own(client: anthropic.Anthropic) -> None:
    request = asked("What is 7 + 8?", thinking={"type": "enabled", "budget_tokens": 1024})
    for message in (client.messages.create(**request), streamed(client, **request)):
        thought, answer = message.content
        assert (thought.type, answer.type) == ("thinking", "text")
        assert thought.thinking
        assert "15" in answer.text
        assert "think>" not in answer.text
        assert message.usage.output_tokens_details.thinking_tokens > 0
    # The client sends them back.
    turn = {"role": "assistant", "content": message.content}
    again = client.messages.create(**asked("What is 7 + 8?", turn, CAPITAL))
    assert "Paris" in text_of(again)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_calls_a_tool_and_answers(client: anthropic.Anthropic, is_streamed: bool) -> None:
    ask = streamed if is_streamed else (lambda client, **fields: client.messages.create(**fields))
    called = ask(client, **asked(WEATHER, tools=[TOOL]))
    assert called.stop_reason == "tool_use"
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees, sunny"}
    turn = {"role": "assistant", "content": called.content}
    answered = ask(client, **asked(WEATHER, turn, user([result]), tools=[TOOL]))
    assert answered.stop_reason == "end_turn"
    assert "18" in text_of(answered)


@needs_grammars
def test_a_choice_and_a_schema_are_followed(client: anthropic.Anthropic) -> None:
    forced = client.messages.create(
        **asked("Hello", tools=[TOOL], tool_choice={"type": "tool", "name": "get_weather"})
    )
    assert forced.stop_reason == "tool_use"
    assert [block.name for block in forced.content] == ["get_weather"]
    free = client.messages.create(**asked(WEATHER, tools=[TOOL], tool_choice={"type": "none"}))
    assert free.stop_reason == "end_turn"
    schema = {
        "type": "object",
        "properties": {"total": {"type": "integer"}},
        "required": ["total"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "schema": schema}
    answer = client.messages.create(**asked("What is 7 + 8?", output_config={"format": form}))
    assert text_of(answer).startswith("{")


def test_errors_are_the_classes_of_the_client(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens must be at least 1"):
        client.messages.create(**asked("Hello", max_tokens=0))
    picture = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        client.messages.create(**asked(user([{"type": "image", "source": picture}])))
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        client.messages.create(**asked("word " * 20_000))
