"""With a forced call, the answer is a call, for any model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.demo import MODEL_PATH
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.native import slowed
from tests.support.server import ServerProcess

pytestmark = needs_grammars

CITY = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"$ref": "#/$defs/city"},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Oslo", "Quito"]}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module", params=BACKENDS)
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    backend = ("--grammar-backend", request.param)
    with ServerProcess("--model-path", str(MODEL_PATH), *backend) as made:
        yield made.wait_ready()


def body(**fields: Any) -> dict[str, Any]:
    # As many tokens as a call takes with all blanks that it may have.
    messages = [{"role": "user", "content": "Say hello."}]
    return {"model": "m", "messages": messages, "tools": [CITY, NOW], "max_tokens": 700, **fields}


def ask(server: ServerProcess, **fields: Any) -> Any:
    return server.client.post("/v1/chat/completions", json=body(**fields))


def check_weather(call: dict[str, Any]) -> None:
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Oslo", "Quito")
    assert 1 <= arguments["days"] <= 7


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_named_function_is_called(server: ServerProcess, temperature: float) -> None:
    answer = ask(
        server, tool_choice=NAMED, temperature=temperature, seed=2, parallel_tool_calls=False
    )
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert choice["finish_reason"] == "tool_calls", answer.text
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert len(call["id"]) == len("call_") + 24
    check_weather(call)
    assert not choice["message"]["content"]


def test_required_calls_one_of_the_functions_at_least(server: ServerProcess) -> None:
    answer = ask(server, tool_choice="required", seed=2, parallel_tool_calls=False)
    (choice,) = answer.json()["choices"]
    calls = choice["message"]["tool_calls"]
    assert calls, answer.text
    assert {call["function"]["name"] for call in calls} <= {"get_weather", "now"}
    assert all(isinstance(json.loads(call["function"]["arguments"]), dict) for call in calls)


def test_a_forced_call_is_streamed(server: ServerProcess) -> None:
    parts: list[dict[str, Any]] = []
    reasons = []
    # At a temperature, blanks may follow the call until the limit.
    request = body(tool_choice=NAMED, stream=True, parallel_tool_calls=False, temperature=0.0)
    # A busy front sends what came meanwhile in one piece.
    with (
        slowed(server, 0.02),
        server.client.stream("POST", "/v1/chat/completions", json=request) as events,
    ):
        assert events.status_code == 200, events.read()
        for line in events.iter_lines():
            if line.startswith("data: {"):
                assert '"error"' not in line
                (choice,) = json.loads(line[6:])["choices"]
                parts += choice["delta"].get("tool_calls") or []
                reasons.append(choice["finish_reason"])
    names = [part["function"].get("name") for part in parts]
    # Arguments come bit by bit behind the name.
    assert names == ["get_weather", *[None] * (len(parts) - 1)]
    assert len(parts) > 2
    assert parts[0]["function"]["arguments"] == ""
    arguments = "".join(part["function"]["arguments"] for part in parts)
    check_weather({"function": {"name": "get_weather", "arguments": arguments}})
    assert reasons[-1] == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"contains": {}}}}
                ],
            },
            "tools[0].function.parameters",
        ),
    ],
)
def test_refusals_name_the_field(server: ServerProcess, fields: dict[str, Any], param: str) -> None:
    answer = ask(server, **fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
