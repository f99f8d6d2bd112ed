"""`haystack-ai`: its chat generator, its agent and its plain generator."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.scenarios import CAPITAL, MODEL, OUTLOOK, SUM, WEATHER, Total, need

need("haystack", "haystack")


@pytest.fixture
def make(openai_url: str) -> Any:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.utils import Secret

    def made(**fields: Any) -> Any:
        settings = {"temperature": 0, **fields.pop("generation_kwargs", {})}
        return OpenAIChatGenerator(
            api_key=Secret.from_token("none"),
            model=MODEL,
            api_base_url=openai_url,
            generation_kwargs=settings,
            max_retries=0,
            **fields,
        )

    return made


def user(text: str) -> list[Any]:
    from haystack.dataclasses import ChatMessage

    return [ChatMessage.from_user(text)]


def weather_tool() -> Any:
    from haystack.tools import Tool

    def look(city: str) -> str:
        assert city == "Oslo"
        return OUTLOOK

    return Tool(
        name="get_weather",
        description="Get the current weather of a city",
        parameters={
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        function=look,
    )


def test_an_agent_calls_a_tool_and_reports(make: Any) -> None:
    from haystack.components.agents import Agent

    agent = Agent(chat_generator=make(), tools=[weather_tool()])
    messages = agent.run(messages=user(WEATHER))["messages"]
    assert any(message.tool_call for message in messages)
    assert "12" in messages[-1].text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_strict_tool(make: Any, is_streamed: bool) -> None:
    chunks: list[Any] = []
    generator = make(tools_strict=True, streaming_callback=chunks.append if is_streamed else None)
    (reply,) = generator.run(messages=user(WEATHER), tools=[weather_tool()])["replies"]
    assert reply.tool_call.arguments == {"city": "Oslo"}
    assert bool(chunks) == is_streamed


def test_an_answer_in_a_class(make: Any) -> None:
    generator = make(generation_kwargs={"response_format": Total})
    (reply,) = generator.run(messages=user(SUM))["replies"]
    assert Total.model_validate_json(reply.text) == Total(total=15)
    tools = {"tools": [weather_tool()], "tools_strict": True}
    (reply,) = generator.run(messages=user(SUM), **tools)["replies"]
    assert isinstance(Total.model_validate_json(reply.text), Total)


def test_a_stream_equals_the_whole_answer(make: Any) -> None:
    chunks: list[Any] = []
    (whole,) = make().run(messages=user(CAPITAL))["replies"]
    (streamed,) = make(streaming_callback=chunks.append).run(messages=user(CAPITAL))["replies"]
    assert streamed.text == whole.text == "".join(chunk.content for chunk in chunks)


def test_a_mistake_is_the_clients_bad_request_error(make: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="2048"):
        make().run(messages=user("word " * 5000))
