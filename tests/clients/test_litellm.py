"""`litellm`: its `openai/` and `hosted_vllm/` routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.scenarios import CAPITAL, MODEL, OUTLOOK, SUM, WEATHER, Total, Weather, need

litellm = need("litellm", "litellm")
GET_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "strict": True,
        "parameters": {**Weather.model_json_schema(), "additionalProperties": False},
    },
}


@pytest.fixture(params=["openai", "hosted_vllm"])
def ask(request: pytest.FixtureRequest, openai_url: str) -> Any:
    def made(messages: Any, **fields: Any) -> Any:
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return litellm.completion(
            model=f"{request.param}/{MODEL}",
            api_base=openai_url,
            api_key="none",
            temperature=0,
            messages=messages,
            **fields,
        )

    return made


def test_a_tool_is_called_and_its_result_reported(ask: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    message = ask(messages, tools=[GET_WEATHER]).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": OUTLOOK}]
    assert "12" in ask(messages, tools=[GET_WEATHER]).choices[0].message.content


def test_a_stream_is_rebuilt_as_the_whole_answer(ask: Any) -> None:
    whole = ask(CAPITAL)
    chunks = list(ask(CAPITAL, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
    called = litellm.stream_chunk_builder(list(ask(WEATHER, tools=[GET_WEATHER], stream=True)))
    (call,) = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


def test_an_answer_in_a_class(ask: Any) -> None:
    answer = ask(SUM, response_format=Total).choices[0].message.content
    assert Total.model_validate_json(answer) == Total(total=15)


def test_thoughts_are_apart(ask: Any) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    message = ask("What is 7 + 8?", extra_body=thinking).choices[0].message
    assert message.reasoning_content
    assert "15" in message.content
    assert "<think>" not in message.content


def test_responses_and_messages(openai_url: str, url: str) -> None:
    response = litellm.responses(
        model=f"openai/{MODEL}", input=CAPITAL, api_base=openai_url, api_key="none", temperature=0
    )
    (message,) = response.output
    assert "Paris" in message.content[0].text
    answer = litellm.completion(
        model=f"anthropic/{MODEL}",
        messages=[{"role": "user", "content": CAPITAL}],
        api_base=url,
        api_key="none",
        temperature=0,
        max_tokens=50,
    )
    assert "Paris" in answer.choices[0].message.content


def test_completions(openai_url: str) -> None:
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        api_base=openai_url,
        api_key="none",
        prompt="The capital of France is",
        temperature=0,
        max_tokens=8,
    )
    assert "Paris" in answer.choices[0].text


def test_mistakes_are_its_own_errors(ask: Any) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        ask("word " * 5000)
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        ask(CAPITAL, top_p=7)
