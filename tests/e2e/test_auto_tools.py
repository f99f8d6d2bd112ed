"""Calls, thoughts and answers by schema, from a server without flags, by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from headrace.demo import MODEL_PATH
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.server import ServerProcess

pytestmark = needs_grammars


class Weather(BaseModel):
    """Get the current weather of a city"""

    # The question is about another one.
    city: Literal["Oslo", "Quito"]


class Total(BaseModel):
    total: int = Field(ge=0, le=99)


STRICT = openai.pydantic_function_tool(Weather, name="get_weather")
LOOSE: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
WEATHER = "What is the weather in Paris?"
SUM = "What is 7 + 8?"
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module", params=BACKENDS)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    backend = ("--grammar-backend", request.param)
    with ServerProcess("--model-path", str(MODEL_PATH), *backend) as made:
        yield made.wait_ready()


@pytest.fixture
def chat(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).chat


def asked(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "m", "messages": messages, "temperature": 0, "max_tokens": 300, **fields}


def whole(chat: Any, question: str, **fields: Any) -> Any:
    return chat.completions.create(**asked(question, **fields)).choices[0]


def called(choice: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in choice.message.tool_calls or []
    ]


def test_the_log_and_the_server_say_which_parsers(server: ServerProcess) -> None:
    (line,) = [line for line in server.lines if "tool_call_parser" in line]
    assert "tool_call_parser: hermes (the chat template has" in line
    assert "reasoning_parser: qwen3 (the chat template has" in line
    info = server.client.get("/server_info").json()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", "qwen3")


def test_calls_and_thoughts_are_parsed_without_flags(chat: Any) -> None:
    choice = whole(chat, WEATHER, tools=[LOOSE])
    assert choice.finish_reason == "tool_calls"
    assert called(choice) == [("get_weather", {"city": "Paris"})]
    choice = whole(chat, SUM, extra_body=THINKING)
    assert "<think>" not in choice.message.content
    assert "15" in choice.message.content
    assert choice.message.reasoning_content


def test_thoughts_have_a_budget(chat: Any) -> None:
    free = chat.completions.create(**asked(SUM, extra_body=THINKING))
    count = free.usage.completion_tokens_details.reasoning_tokens
    assert count > 6
    for budget in (0, 4):
        body = {**THINKING, "max_thinking_tokens": budget}
        answer = chat.completions.create(**asked(SUM, extra_body=body))
        # The tag that ends them counts, and the line break before it, and the tag that begins them.
        thoughts = answer.usage.completion_tokens_details
        assert budget < thoughts.reasoning_tokens <= budget + 3
        message = answer.choices[0].message
        assert free.choices[0].message.reasoning.startswith(message.reasoning_content or "")
        # So small a model goes on to think in its answer.
        assert "15" in message.content
    assert chat.completions.create(
        **asked(SUM, extra_body={**THINKING, "max_thinking_tokens": 250})
    )


def test_a_strict_call_follows_its_schema(chat: Any) -> None:
    choice = whole(chat, WEATHER, tools=[STRICT])
    assert choice.finish_reason == "tool_calls"
    ((name, arguments),) = called(choice)
    assert name == "get_weather"
    assert arguments["city"] in ("Oslo", "Quito")
    thought = whole(chat, WEATHER, tools=[STRICT], extra_body=THINKING)
    assert thought.message.reasoning_content
    assert called(thought)[0][1]["city"] in ("Oslo", "Quito")
    # Text is free.
    assert "Paris" in whole(chat, "What is the capital of France?", tools=[STRICT]).message.content


def test_parsed_into_classes(chat: Any) -> None:
    ask = asked(WEATHER, tools=[STRICT], response_format=Total)
    choice = chat.completions.parse(**ask).choices[0]
    (call,) = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    ask = asked(f"{SUM} Answer as JSON.", tools=[STRICT], response_format=Total)
    choice = chat.completions.parse(**ask).choices[0]
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Total)


@pytest.mark.parametrize("fields", [{}, {"response_format": Total}])
def test_a_stream_equals_the_whole_answer(chat: Any, fields: dict[str, Any]) -> None:
    for question in (WEATHER, f"{SUM} Answer as JSON."):
        ask = asked(question, tools=[STRICT], **fields)
        expected = chat.completions.parse(**ask).choices[0]
        with chat.completions.stream(**ask) as stream:
            for _ in stream:
                pass
            choice = stream.get_final_completion().choices[0]
        assert choice.finish_reason == expected.finish_reason
        assert called(choice) == called(expected)
        assert (choice.message.content or None) == (expected.message.content or None)
        assert choice.message.parsed == expected.message.parsed


def test_one_call_at_most(chat: Any) -> None:
    question = "What is the weather in Paris and in Oslo?"
    for fields in ({}, {"response_format": {"type": "json_object"}}):
        several = whole(chat, question, tools=[STRICT], **fields)
        one = whole(chat, question, tools=[STRICT], parallel_tool_calls=False, **fields)
        assert len(called(several)) > 1
        assert len(called(one)) == 1


def test_without_parsers() -> None:
    options = ("--tool-call-parser", "none", "--reasoning-parser", "none")
    with ServerProcess("--model-path", str(MODEL_PATH), *options) as server:
        server.wait_ready()
        chat = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).chat
        choice = whole(chat, WEATHER, tools=[STRICT])
        assert choice.message.tool_calls is None
        assert '<tool_call>\n{"name": "get_weather"' in choice.message.content
        assert "<think>" in whole(chat, SUM, extra_body=THINKING).message.content
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
            whole(chat, WEATHER, tools=[STRICT], response_format={"type": "json_object"})
        assert caught.value.param == "response_format"
