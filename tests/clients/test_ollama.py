"""`ollama`: chat, generate, and its questions about models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.scenarios import CAPITAL, OUTLOOK, SUM, WEATHER, Total, need

ollama = need("ollama", "ollama")
GREEDY = {"temperature": 0}


def get_weather(city: str) -> str:
    """Get the current weather of a city

    Args:
        city: Name of the city.
    """
    assert city == "Oslo"
    return OUTLOOK


@pytest.fixture
def client(url: str) -> Any:
    return ollama.Client(host=url)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_tool_is_called_and_its_result_reported(client: Any) -> None:
    messages = user(WEATHER)
    ask: dict[str, Any] = {"model": "m", "options": GREEDY, "tools": [get_weather]}
    message = client.chat(messages=messages, **ask).message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    result = get_weather(**call.function.arguments)
    messages += [message, {"role": "tool", "content": result, "tool_name": "get_weather"}]
    assert "12" in client.chat(messages=messages, **ask).message.content


def test_a_stream_equals_the_whole_answer(client: Any) -> None:
    ask: dict[str, Any] = {"model": "m", "messages": user(CAPITAL), "options": GREEDY}
    chunks = list(client.chat(stream=True, **ask))
    # Tokens that a busy machine produced meanwhile share a chunk; the last one has no text.
    assert len(chunks) > 1
    assert not chunks[-1].message.content
    assert [chunk.done for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    text = "".join(chunk.message.content or "" for chunk in chunks)
    whole = client.chat(**ask)
    assert text == whole.message.content
    assert "Paris" in text
    assert (whole.done_reason, whole.eval_count) == ("stop", chunks[-1].eval_count)


def test_an_answer_in_a_class(client: Any) -> None:
    schema = Total.model_json_schema()
    answer = client.chat(model="m", messages=user(SUM), format=schema, options=GREEDY)
    assert Total.model_validate_json(answer.message.content) == Total(total=15)


def test_thoughts_have_a_field_of_their_own(client: Any) -> None:
    said = user("What is 7 + 8?")
    message = client.chat(model="m", messages=said, think=True, options=GREEDY).message
    assert message.thinking
    assert "15" in message.content


def test_a_prompt_is_continued(client: Any) -> None:
    answer = client.generate(model="m", prompt=CAPITAL, options=GREEDY)
    assert "Paris" in answer.response
    raw = client.generate(
        model="m", prompt="The capital of France is", raw=True, options={"num_predict": 2}
    )
    assert raw.eval_count == 2


def test_what_it_asks_about_models(client: Any) -> None:
    (model,) = client.list().models
    shown = client.show(model.model)
    assert {"completion", "tools"} <= set(shown.capabilities)
    assert shown.template
    assert [each.model for each in client.ps().models] == [model.model]


def test_the_asynchronous_client(url: str) -> None:
    async def ask() -> str:
        text = ""
        stream = await ollama.AsyncClient(host=url).chat(
            model="m", messages=user(CAPITAL), stream=True, options=GREEDY
        )
        async for chunk in stream:
            text += chunk.message.content or ""
        return text

    assert "Paris" in asyncio.run(ask())


def test_mistakes_are_its_response_error(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="temperature") as caught:
        client.chat(model="m", messages=user(CAPITAL), options={"temperature": -1})
    assert caught.value.status_code == 400
