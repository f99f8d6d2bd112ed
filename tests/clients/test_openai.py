"""`openai`: its newest version and the last 1.x."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.clients.scenarios import CAPITAL, OUTLOOK, SUM, WEATHER, Place, Total, Weather, need

openai = need("openai", "openai")
GET_WEATHER = openai.pydantic_function_tool(Weather, name="get_weather")


class Train(BaseModel):
    kind: Literal["train"]
    is_late: bool


class Plane(BaseModel):
    kind: Literal["plane"]
    is_full: bool


class Trip(BaseModel):
    leg: Annotated[Train | Plane, Field(discriminator="kind")]


@pytest.fixture
def chat(openai_url: str) -> Any:
    return openai.OpenAI(base_url=openai_url, api_key="none", max_retries=0).chat.completions


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_tool_is_called_and_its_result_reported(chat: Any) -> None:
    ask: dict[str, Any] = {"model": "m", "temperature": 0, "tools": [GET_WEATHER]}
    messages = user(WEATHER)
    message = chat.parse(messages=messages, **ask).choices[0].message
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == Weather(city="Oslo")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": OUTLOOK}]
    answer = chat.create(messages=messages, **ask).choices[0]
    assert answer.finish_reason == "stop"
    assert "12" in answer.message.content


def test_a_streamed_call_equals_the_whole_one(chat: Any) -> None:
    with chat.stream(
        model="m", temperature=0, tools=[GET_WEATHER], messages=user(WEATHER)
    ) as stream:
        kinds = [event.type for event in stream]
        choice = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.parsed_arguments == Weather(city="Oslo")


def test_an_answer_in_a_class_beside_tools(chat: Any) -> None:
    ask: dict[str, Any] = {"model": "m", "temperature": 0, "response_format": Total}
    message = chat.parse(messages=user(SUM), tools=[GET_WEATHER], **ask).choices[0].message
    # With tools in its prompt the model no longer adds.
    assert isinstance(message.parsed, Total)
    place = chat.parse(
        model="m", temperature=0, messages=user(f"{CAPITAL} Answer as JSON."), response_format=Place
    )
    assert place.choices[0].message.parsed.city in ("Oslo", "Quito")


def test_one_of_several_classes(chat: Any) -> None:
    answer = chat.parse(model="m", messages=user(SUM), temperature=0, response_format=Trip)
    assert isinstance(answer.choices[0].message.parsed.leg, Train | Plane)


def test_a_class_by_stream_grows_and_is_whole_at_the_end(chat: Any) -> None:
    ask: dict[str, Any] = {"model": "m", "temperature": 0, "response_format": Total}
    with chat.stream(messages=user(SUM), **ask) as stream:
        events = [event for event in stream if event.type == "content.delta"]
        whole = stream.get_final_completion()
    assert "".join(event.delta for event in events) == whole.choices[0].message.content
    assert whole.choices[0].message.parsed == Total(total=15)


def test_a_named_function_is_forced(chat: Any) -> None:
    choice = chat.create(
        model="m",
        temperature=0,
        tools=[GET_WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        messages=user(CAPITAL),
    ).choices[0]
    assert json.loads(choice.message.tool_calls[0].function.arguments).keys() == {"city"}


def test_a_stream_with_usage_by_the_asynchronous_client(openai_url: str) -> None:
    async def streamed() -> tuple[str, Any]:
        async with openai.AsyncOpenAI(base_url=openai_url, api_key="none") as client:
            text, usage = "", None
            async for chunk in await client.chat.completions.create(
                model="m",
                temperature=0,
                messages=user(CAPITAL),
                stream=True,
                stream_options={"include_usage": True},
            ):
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                usage = chunk.usage or usage
            return text, usage

    text, usage = asyncio.run(streamed())
    assert "Paris" in text
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0


RESPONSE_TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "parameters": GET_WEATHER["function"]["parameters"],
    "strict": True,
}


def test_responses_go_on_from_one_another(openai_url: str) -> None:
    responses = openai.OpenAI(base_url=openai_url, api_key="none").responses
    ask: dict[str, Any] = {"model": "m", "temperature": 0, "tools": [RESPONSE_TOOL]}
    called = responses.create(input=WEATHER, **ask)
    (call,) = called.output
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Oslo"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": OUTLOOK}
    with responses.stream(input=[result], previous_response_id=called.id, **ask) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert "12" in answer.output_text
    items = responses.input_items.list(answer.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    said = [*user(WEATHER), call, result]
    stateless = responses.create(input=said, store=False, **ask)
    assert stateless.output_text == answer.output_text


def test_a_response_in_a_class(openai_url: str) -> None:
    responses = openai.OpenAI(base_url=openai_url, api_key="none").responses
    parsed = responses.parse(model="m", input=SUM, text_format=Total, temperature=0)
    assert parsed.output_parsed == Total(total=15)


def test_a_response_in_the_background_is_read_twice(openai_url: str) -> None:
    responses = openai.OpenAI(base_url=openai_url, api_key="none").responses
    events = list(
        responses.create(model="m", input=CAPITAL, temperature=0, background=True, stream=True)
    )
    assert events[-1].type == "response.completed"
    response_id = events[-1].response.id
    again = responses.retrieve(response_id, stream=True, starting_after=2)
    assert [event.sequence_number for event in again] == [*range(3, len(events))]
    assert "Paris" in responses.retrieve(response_id).output_text
    responses.delete(response_id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(response_id)


def test_completions_with_log_probabilities(openai_url: str) -> None:
    client = openai.OpenAI(base_url=openai_url, api_key="none")
    echoed = client.completions.create(
        model="m", prompt="The capital of France is", max_tokens=1, echo=True, logprobs=2
    ).choices[0]
    assert echoed.text.startswith("The capital of France is")
    assert len(echoed.logprobs.tokens) == len(echoed.logprobs.token_logprobs)
    assert echoed.logprobs.token_logprobs[0] is None


def test_mistakes_are_its_bad_request_error(chat: Any, openai_url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        chat.create(model="m", messages=user(CAPITAL), temperature=-1)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="2048"):
        chat.create(model="m", messages=user("word " * 5000))
    with pytest.raises(openai.NotFoundError):
        openai.OpenAI(base_url=openai_url, api_key="none").models.retrieve("nobody/nothing")
