"""The official client's Responses API against the demo model: turns, tools, thoughts, classes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from headrace.demo import MODEL_PATH
from tests.support.grammar_backends import needs_grammars
from tests.support.server import ServerProcess
from tests.support.waiting import until

CAPITAL = "What is the capital of France?"
WEATHER = "What is the weather in Paris?"
SUM = "What is 7 + 8?"
THINKS = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": True}}
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    kept: Path = tmp_path_factory.mktemp("kept") / "responses.sqlite"
    options = ("--response-store", str(kept), "--enable-cache-report")
    with ServerProcess("--model-path", str(MODEL_PATH), *options) as made:
        yield made.wait_ready()


@pytest.fixture
def responses(server: ServerProcess) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0).responses


def asked(said: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "demo", "input": said, "temperature": 0, **fields}


def streamed(responses: Any, **request: Any) -> Any:
    with responses.stream(**request) as stream:
        for _ in stream:
            pass
        return stream.get_final_response()


def test_turns_whole_and_streamed(responses: Any) -> None:
    whole = responses.create(**asked(CAPITAL))
    assert "Paris" in whole.output_text
    assert streamed(responses, **asked(CAPITAL)).output_text == whole.output_text
    again = responses.create(**asked(SUM, previous_response_id=whole.id))
    assert "15" in again.output_text
    assert responses.retrieve(again.id).output_text == again.output_text
    counted = responses.input_tokens.count(model="demo", input=CAPITAL)
    assert counted.input_tokens == whole.usage.input_tokens


def test_thoughts_are_items(responses: Any) -> None:
    include = ["reasoning.encrypted_content"]
    first = streamed(responses, **asked(SUM, extra_body=THINKS, store=False, include=include))
    thought, message = first.output
    assert (thought.type, message.type) == ("reasoning", "message")
    assert thought.content[0].text
    assert "think>" not in first.output_text
    assert first.usage.output_tokens_details.reasoning_tokens > 0
    said = [{"role": "user", "content": SUM}, *first.output, {"role": "user", "content": CAPITAL}]
    assert "Paris" in responses.create(**asked(said, store=False)).output_text


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_agent_calls_a_tool_and_answers(responses: Any, is_streamed: bool) -> None:
    def ask(**request: Any) -> Any:
        return streamed(responses, **request) if is_streamed else responses.create(**request)

    called = ask(**asked(WEATHER, tools=[TOOL]))
    (call,) = called.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    answer = ask(**asked([result], previous_response_id=called.id, tools=[TOOL]))
    assert "18" in answer.output_text
    # All of the first turn's prompt but its last page, which is not full.
    assert answer.usage.input_tokens_details.cached_tokens >= called.usage.input_tokens - 32
    # The same by a client that keeps the conversation.
    said = [{"role": "user", "content": WEATHER}, call, result]
    assert ask(**asked(said, tools=[TOOL], store=False)).output_text == answer.output_text


class Total(BaseModel):
    total: int


@needs_grammars
def test_parsed_into_a_class(responses: Any) -> None:
    parsed = responses.parse(**asked(f"{SUM} Answer as JSON.", text_format=Total))
    assert isinstance(parsed.output_parsed, Total)
    forced = responses.create(**asked("Hello", tools=[TOOL], tool_choice="required"))
    assert [item.type for item in forced.output] == ["function_call"]


def test_in_the_background(responses: Any) -> None:
    begun = responses.create(**asked(CAPITAL, background=True))
    until(lambda: responses.retrieve(begun.id).status == "completed")
    assert "Paris" in responses.retrieve(begun.id).output_text
    responses.delete(begun.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(begun.id)


@pytest.mark.parametrize("body", [{}, THINKS], ids=["plain", "thinks"])
def test_logprobs(responses: Any, body: dict[str, Any]) -> None:
    ask = asked(CAPITAL, extra_body=body, include=["message.output_text.logprobs"], top_logprobs=2)
    found = []
    for response in (responses.create(**ask), streamed(responses, **ask)):
        message = response.output[-1]
        logprobs = message.content[0].logprobs
        # The token that ended it has no text, nor have the lines between a thought and it.
        said = "".join(each.token for each in logprobs[:3]).lstrip()
        assert said
        assert response.output_text.startswith(said)
        assert all(len(each.top_logprobs) == 2 for each in logprobs)
        found.append([each.token for each in logprobs])
    assert found[0] == found[1]
