"""Tools of chat in their other forms: functions, custom tools, allowed tools, earlier calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

ADD = {"name": "add", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "custom": {"name": "sql", "description": "Ask the database."}}
FUNCTION = {"type": "function", "function": ADD}
# Every call that the model makes below.
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
QUERY = '<tool_call>\n{"name": "sql", "arguments": {"input": "SELECT \\"1\\""}}\n</tool_call>'
SHOWN = "{{ tools | tojson }}|{% for m in messages %}{{ m | tojson }}\n{% endfor %}"


async def test_functions_are_answered_in_their_own_form(make_front: Any, events: Any) -> None:
    front = make_front(lambda _: f"I add.{CALL}{CALL}", tools="hermes")
    choice = (await front.chat(functions=[ADD])).json()["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "I add."
    called = choice["message"]["function_call"]
    assert (called["name"], json.loads(called["arguments"])) == ("add", {"a": 1})
    chunks = events(await front.chat(functions=[ADD], function_call="auto", stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert calls[0] == {"name": "add", "arguments": ""}
    assert json.loads("".join(call["arguments"] for call in calls)) == {"a": 1}
    assert not any("tool_calls" in delta for delta in deltas)
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"
    quiet = (await front.chat(functions=[ADD], function_call="none")).json()["choices"][0]
    assert quiet["finish_reason"] == "stop"
    assert "<tool_call>" in quiet["message"]["content"]


async def test_custom_tools_are_called_with_text(make_front: Any, events: Any) -> None:
    front = make_front(lambda _: f"{QUERY}{CALL}{QUERY}", tools="hermes")
    tools = [CUSTOM, FUNCTION]
    choice = (await front.chat(tools=tools)).json()["choices"][0]
    first, second, third = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert first == {
        "index": 0,
        "id": first["id"],
        "type": "custom",
        "custom": {"name": "sql", "input": 'SELECT "1"'},
    }
    assert second["function"]["name"] == "add"
    assert json.loads(second["function"]["arguments"]) == {"a": 1}
    assert third["custom"] == first["custom"]
    chunks = events(await front.chat(tools=tools, stream=True))
    parts = [
        part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    assert sorted({part["index"] for part in parts}) == [0, 1, 2]
    assert parts[0]["custom"] == parts[-1]["custom"] == first["custom"]
    assert parts[1]["function"]["name"] == "add"


async def test_what_the_model_reads_of_other_forms(make_front: Any) -> None:
    front = make_front(lambda prompt: prompt, template=SHOWN)
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: X"}}
    custom = {"type": "custom", "custom": {**CUSTOM["custom"], "format": grammar}}
    earlier = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "1"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {}}]},
        {"role": "tool", "tool_call_id": "c", "content": "one row"},
    ]
    earlier[3]["tool_calls"][0]["custom"] = {"name": "sql", "input": "x"}  # type: ignore[index]
    answer = await front.chat(messages=earlier, tools=[FUNCTION, custom])
    text = answer.json()["choices"][0]["message"]["content"]
    shown, _, rest = text.partition("|")
    sql = json.loads(shown)[1]["function"]
    assert sql["description"] == "Ask the database.\n\nstart: X"
    assert sql["parameters"]["required"] == ["input"]
    _, called, result, asked, row = (json.loads(line) for line in rest.splitlines())
    assert called["tool_calls"] == [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    ]
    assert (result["role"], result["name"]) == ("tool", "add")
    assert asked["tool_calls"][0]["function"] == {"name": "sql", "arguments": {"input": "x"}}
    assert asked["tool_calls"][0]["id"] == row["tool_call_id"] == "c"


def allowed(mode: str, *names: str, key: str = "function") -> dict[str, Any]:
    tools = [{"type": key, key: {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def test_allowed_tools(make_front: Any) -> None:
    """Those alone are called; all are shown, so that the prompt is the one that is cached."""
    template = "{{ tools | tojson }}{{ messages[0].content }}"
    front = make_front(lambda _: f"{CALL}{QUERY}", tools="hermes", template=template)

    async def names(choice: dict[str, Any]) -> list[str]:
        answer = (await front.chat(tools=[FUNCTION, CUSTOM], tool_choice=choice)).json()
        calls = answer["choices"][0]["message"].get("tool_calls", [])
        return [call[call["type"]]["name"] for call in calls]

    assert await names(allowed("auto", "add")) == ["add"]
    assert await names(allowed("auto", "sql", key="custom")) == ["sql"]
    assert await names(allowed("auto", "add", "sql")) == ["add", "sql"]
    plain = (await front.chat(tools=[FUNCTION, CUSTOM])).json()
    assert "sql" in plain["choices"][0]["message"]["tool_calls"][1]["custom"]["name"]
    assert len({bytes(request.input_ids) for request in front.engine.requests}) == 1
    # A call of another one is text, as one that is not offered.
    answer = (await front.chat(tools=[FUNCTION, CUSTOM], tool_choice=allowed("auto", "add"))).json()
    assert answer["choices"][0]["message"]["content"].strip() == QUERY.strip()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": []}, "function_call"),
        ({"functions": [{"description": "no name"}]}, "tools"),
        ({"functions": [{"name": "f", "parameters": {"type": 3}}]}, None),
        ({"function_call": "auto"}, "function_call"),
        ({"functions": [ADD], "function_call": "required"}, "function_call"),
        ({"functions": [ADD], "function_call": {"name": "other"}}, "tool_choice"),
        ({"functions": [ADD], "tools": [FUNCTION]}, "functions"),
        ({"functions": [ADD], "tool_choice": "auto"}, "functions"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "x"}}}]},
            "tools[0].custom",
        ),
        ({"tools": [FUNCTION], "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": allowed("auto")}, "tool_choice"),
        (
            {"tools": [FUNCTION], "tool_choice": allowed("perhaps", "add")},
            "tool_choice.allowed_tools.mode",
        ),
        ({"tool_choice": allowed("auto", "add")}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"prediction": {"type": "audio", "content": "x"}}, "prediction.type"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"store": "yes"}, "store"),
    ],
)
async def test_malformed_forms_are_refused(
    make_front: Any, fields: dict[str, Any], param: str | None
) -> None:
    answer = await make_front(tools="hermes").chat(**fields)
    assert answer.status_code == 400, answer.text
    assert param is None or answer.json()["param"] == param


async def test_verbosity_reaches_the_template(make_front: Any) -> None:
    front = make_front(lambda prompt: prompt, template="{{ messages[0].content }}{{ verbosity }}")
    answer = (await front.chat("q", verbosity="low")).json()
    assert answer["choices"][0]["message"]["content"] == "qlow"


async def test_service_tier_is_told(make_front: Any, events: Any) -> None:
    front = make_front()
    assert (await front.chat(service_tier="priority")).json()["service_tier"] == "default"
    chunks = events(await front.chat(service_tier="auto", stream=True))
    assert {chunk["service_tier"] for chunk in chunks} == {"default"}


async def test_obfuscated_chunks_have_few_sizes(make_front: Any, events: Any) -> None:
    front = make_front(lambda _: "a" + "b" * 7 + "ü" * 4)
    options = {"include_obfuscation": True}
    for ask in (front.chat, front.complete):
        chunks = events(await ask(stream=True, stream_options=options))
        assert all("obfuscation" in chunk for chunk in chunks)
        chunks = events(await ask(stream=True))
        assert not any("obfuscation" in chunk for chunk in chunks)
    chunks = events(await front.chat(stream=True, stream_options=options))
    deltas = [(chunk["choices"][0]["delta"], chunk["obfuscation"]) for chunk in chunks]
    sizes = {
        len(json.dumps(delta, separators=(",", ":"), ensure_ascii=False).encode()) + len(noise)
        for delta, noise in deltas
    }
    assert all(size % 32 == 0 for size in sizes)
