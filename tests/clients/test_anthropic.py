"""`anthropic`: Messages, by both of its clients and both headers of keys."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.scenarios import CAPITAL, OUTLOOK, SUM, WEATHER, Total, need

anthropic = need("anthropic", "anthropic")
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.fixture
def messages(url: str) -> Any:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0).messages


def asked(*said: Any, **fields: Any) -> dict[str, Any]:
    turns = [each if isinstance(each, dict) else user(each) for each in said]
    # Newer clients have no field for it.
    greedy = {"temperature": 0}
    return {"model": "m", "max_tokens": 200, "messages": turns, "extra_body": greedy, **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_tool_is_called_and_its_result_reported(messages: Any) -> None:
    called = messages.create(**asked(WEATHER, tools=[TOOL]))
    assert called.stop_reason == "tool_use"
    (call,) = called.content
    assert (call.name, call.input) == ("get_weather", {"city": "Oslo"})
    turn = {"role": "assistant", "content": called.content}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": OUTLOOK}
    with messages.stream(**asked(WEATHER, turn, user([result]), tools=[TOOL])) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_message()
    assert {"message_start", "content_block_delta", "text", "message_stop"} <= kinds
    assert answer.stop_reason == "end_turn"
    assert "12" in text_of(answer)


def test_a_streamed_call_equals_the_whole_one(messages: Any) -> None:
    ask = asked(WEATHER, tools=[TOOL])
    with messages.stream(**ask) as stream:
        (streamed,) = stream.get_final_message().content
    (whole,) = messages.create(**ask).content
    assert (streamed.type, streamed.name, streamed.input) == (whole.type, whole.name, whole.input)


def test_an_answer_in_a_class(messages: Any) -> None:
    parsed = messages.parse(**asked(SUM, output_format=Total))
    assert parsed.parsed_output == Total(total=15)


def test_thoughts_come_in_blocks_and_may_be_left_out(messages: Any) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    thought, answer = messages.create(**asked("What is 7 + 8?", thinking=thinking)).content
    assert (thought.type, answer.type) == ("thinking", "text")
    assert thought.thinking
    hidden = {**thinking, "display": "omitted"}
    with messages.stream(**asked("What is 7 + 8?", thinking=hidden)) as stream:
        content = stream.get_final_message().content
    assert (content[0].thinking, content[1].text) == ("", answer.text)
    assert content[0].signature
    turn = {"role": "assistant", "content": content}
    assert "Paris" in text_of(messages.create(**asked("What is 7 + 8?", turn, CAPITAL)))


def test_tokens_are_counted(messages: Any) -> None:
    counted = messages.count_tokens(model="m", messages=[user(CAPITAL)])
    assert counted.input_tokens == messages.create(**asked(CAPITAL)).usage.input_tokens


def test_the_asynchronous_client_and_the_other_header(url: str) -> None:
    async def ask() -> Any:
        async with anthropic.AsyncAnthropic(base_url=url, auth_token="none") as client:
            return await client.beta.messages.create(
                **asked(CAPITAL, betas=["context-management-2025-06-27"])
            )

    assert "Paris" in text_of(asyncio.run(ask()))


def test_mistakes_are_its_bad_request_error(messages: Any) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens") as caught:
        messages.create(**asked(CAPITAL, max_tokens=0))
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        messages.create(**asked("word " * 5000))
