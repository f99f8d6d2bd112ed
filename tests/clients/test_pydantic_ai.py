"""`pydantic-ai`: its agent over the OpenAI chat model."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.scenarios import (
    INSTRUCTIONS,
    MODEL,
    OUTLOOK,
    SUM,
    WEATHER,
    Total,
    need,
)

pydantic_ai = need("pydantic_ai", "pydantic_ai")


@pytest.fixture
def agent(openai_url: str) -> Any:
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def make(**fields: Any) -> Any:
        # A provider's connections belong to the event loop that made them.
        provider = OpenAIProvider(base_url=openai_url, api_key="none")
        return pydantic_ai.Agent(
            OpenAIChatModel(MODEL, provider=provider),
            instructions=INSTRUCTIONS,
            model_settings={"temperature": 0},
            **fields,
        )

    return make


def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: Name of the city.
    """
    assert city == "Oslo"
    return OUTLOOK


def test_a_tool_is_called_and_its_result_reported(agent: Any) -> None:
    result = agent(tools=[get_weather]).run_sync(WEATHER)
    kinds = [part.part_kind for message in result.all_messages() for part in message.parts]
    assert kinds.count("tool-call") == kinds.count("tool-return") == 1
    assert "12" in result.output
    assert result.usage.output_tokens > 0


def test_the_same_by_stream(agent: Any) -> None:
    async def streamed() -> tuple[str, str]:
        async with agent(tools=[get_weather]).run_stream(WEATHER) as result:
            pieces = [text async for text in result.stream_text(delta=True)]
            return "".join(pieces), await result.get_output()

    text, output = asyncio.run(streamed())
    assert text == output
    assert "12" in text


@pytest.mark.parametrize("way", ["ToolOutput", "NativeOutput"])
def test_an_answer_in_a_class(agent: Any, way: str) -> None:
    output = getattr(pydantic_ai, way)(Total)
    assert isinstance(agent(output_type=output).run_sync(SUM).output, Total)


def test_a_class_beside_tools(agent: Any) -> None:
    made = agent(output_type=pydantic_ai.NativeOutput(Total), tools=[get_weather])
    # With tools in its prompt the model no longer adds.
    assert isinstance(made.run_sync(SUM).output, Total)


def test_a_mistake_is_its_model_error(agent: Any) -> None:
    from pydantic_ai.exceptions import ModelHTTPError

    with pytest.raises(ModelHTTPError, match="2048") as caught:
        agent().run_sync("word " * 5000)
    assert caught.value.status_code == 400
