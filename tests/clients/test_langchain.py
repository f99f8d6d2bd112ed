"""`langchain-openai`: its chat model, its completions and its embeddings' errors."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.scenarios import CAPITAL, MODEL, OUTLOOK, SUM, WEATHER, Total, Weather, need

langchain_openai = need("langchain_openai", "langchain")


@pytest.fixture
def chat(openai_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        model=MODEL, base_url=openai_url, api_key="none", temperature=0, max_retries=0
    )


def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: Name of the city.
    """
    assert city == "Oslo"
    return OUTLOOK


@pytest.mark.parametrize("strict", [None, True])
def test_a_tool_is_called_and_its_result_reported(chat: Any, strict: bool | None) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    weather = tool(get_weather)
    model = chat.bind_tools([weather], strict=strict)
    messages: list[Any] = [HumanMessage(WEATHER)]
    answer = model.invoke(messages)
    assert [call["args"] for call in answer.tool_calls] == [{"city": "Oslo"}]
    messages += [answer, weather.invoke(answer.tool_calls[0])]
    final = model.invoke(messages)
    assert not final.tool_calls
    assert "12" in final.content
    assert final.usage_metadata["total_tokens"] > 0


def test_streamed_pieces_add_up(chat: Any) -> None:
    whole = chat.invoke(CAPITAL)
    pieces = list(chat.stream(CAPITAL, stream_usage=True))
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    assert total.content == whole.content
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    called = list(chat.bind_tools([get_weather]).stream(WEATHER))
    total = called[0]
    for piece in called[1:]:
        total += piece
    assert [call["args"] for call in total.tool_calls] == [{"city": "Oslo"}]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_answer_in_a_class(chat: Any, method: str) -> None:
    model = chat.with_structured_output(Total, method=method, include_raw=True)
    result = model.invoke(SUM)
    assert result["parsing_error"] is None
    assert isinstance(result["parsed"], Total)


def test_a_class_beside_tools(chat: Any) -> None:
    model = chat.bind_tools([Weather], response_format=Total, strict=True)
    assert isinstance(model.invoke(SUM).additional_kwargs["parsed"], Total)
    assert [call["args"] for call in model.invoke(WEATHER).tool_calls] == [{"city": "Oslo"}]


async def test_many_at_once_by_the_asynchronous_calls(chat: Any) -> None:
    answers = await chat.abatch([CAPITAL] * 8)
    assert all("Paris" in answer.content for answer in answers)


def test_completions(openai_url: str) -> None:
    llm = langchain_openai.OpenAI(
        model=MODEL, base_url=openai_url, api_key="none", temperature=0, max_tokens=8
    )
    assert "Paris" in llm.invoke("The capital of France is")


def test_a_mistake_is_the_clients_bad_request_error(chat: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="2048"):
        chat.invoke("word " * 5000)
