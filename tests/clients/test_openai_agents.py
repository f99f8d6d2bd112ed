"""`openai-agents`: an agent over Responses, its default, and over chat completions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.scenarios import (
    CAPITAL,
    INSTRUCTIONS,
    MODEL,
    OUTLOOK,
    SUM,
    WEATHER,
    Total,
    need,
)

agents = need("agents", "openai_agents")


@agents.function_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: Name of the city.
    """
    assert city == "Oslo"
    return OUTLOOK


@pytest.fixture(params=["responses", "chat"])
def agent(openai_url: str, request: pytest.FixtureRequest) -> Any:
    from openai import AsyncOpenAI

    # Traces would be sent to OpenAI.
    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=openai_url, api_key="none", max_retries=0)
    is_default = request.param == "responses"
    kind = agents.OpenAIResponsesModel if is_default else agents.OpenAIChatCompletionsModel

    def make(**fields: Any) -> Any:
        return agents.Agent(
            name="demo",
            instructions=INSTRUCTIONS,
            model=kind(model=MODEL, openai_client=client),
            model_settings=agents.ModelSettings(temperature=0),
            **fields,
        )

    return make


def called(items: list[Any]) -> list[str]:
    return [item.raw_item.name for item in items if item.type == "tool_call_item"]


def test_a_tool_is_called_and_its_result_reported(agent: Any) -> None:
    result = agents.Runner.run_sync(agent(tools=[get_weather]), WEATHER, max_turns=3)
    assert called(result.new_items) == ["get_weather"]
    assert "12" in result.final_output


def test_the_same_by_stream(agent: Any) -> None:
    async def streamed() -> tuple[str, Any]:
        result = agents.Runner.run_streamed(agent(tools=[get_weather]), WEATHER, max_turns=3)
        text = ""
        async for event in result.stream_events():
            is_raw = event.type == "raw_response_event"
            if is_raw and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return text, result

    text, result = asyncio.run(streamed())
    assert called(result.new_items) == ["get_weather"]
    assert text == result.final_output
    assert "12" in text


def test_an_answer_in_a_class(agent: Any) -> None:
    made = agent(output_type=Total)
    assert agents.Runner.run_sync(made, SUM).final_output == Total(total=15)
    beside_tools = agent(output_type=Total, tools=[get_weather])
    # With tools in its prompt the model no longer adds.
    assert isinstance(agents.Runner.run_sync(beside_tools, SUM).final_output, Total)


def test_another_agent_takes_over(agent: Any) -> None:
    geographer = agent()
    geographer.name = "geographer"
    first = agent(handoffs=[geographer])
    first.model_settings.tool_choice = "required"
    result = agents.Runner.run_sync(first, CAPITAL)
    assert result.last_agent.name == "geographer"
    assert result.final_output


def test_a_mistake_is_the_clients_bad_request_error(agent: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="2048"):
        agents.Runner.run_sync(agent(), "word " * 5000)
