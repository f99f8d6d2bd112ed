"""Forced calls with every parser: a random model's output under their grammar is a valid call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest

from openai_api.tool_parsers.registry import TOOL_PARSERS
from tests.support.fake_engine import EOS_ID, byte_tokenizer
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.grammar_walk import InProcessCompiler, drawn
from tests.unit.openai_api.conftest import events_of

pytestmark = needs_grammars

SCHEMAS: dict[str, dict[str, Any]] = {
    "plan": {
        "type": "object",
        "properties": {
            "city": {"$ref": "#/$defs/city"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "steps": {"type": "array", "items": {"enum": [1, None]}, "maxItems": 2},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"city": {"enum": ["Oslo", 'a "b"', "</tool_call>[TOOL_CALLS]"]}},
    },
    "stop": {
        "type": "object",
        "properties": {"now": {"type": "boolean"}},
        "required": ["now"],
        "additionalProperties": False,
    },
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "plan"}}
# With thoughts before, where the family has them.
REASONING = {
    "hermes": ("qwen3", "<think>hm</think>\n"),
    "deepseekv3": ("deepseek-r1", "hm</think>\n"),
    "kimi_k2": ("kimi_k2", "<think>hm</think>"),
    "glm45": ("glm45", "<think>hm</think>\n"),
    "gpt-oss": (
        "gpt-oss",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
    ),
}


def joined(deltas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of a stream, put together."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for part in delta.get("tool_calls") or ():
            if part.get("id") is not None:
                calls.append({"name": part["function"]["name"], "arguments": ""})
            assert part["index"] == len(calls) - 1
            calls[-1]["arguments"] += part["function"].get("arguments") or ""
    return calls


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("name", list(TOOL_PARSERS))
async def test_a_forced_call(
    make_front: Any, tmp_path: Path, name: str, choice: Any, backend: str
) -> None:
    reasoning, thoughts = REASONING.get(name, (None, ""))
    marks = [mark for mark in TOOL_PARSERS.load(name).markers if mark not in ("<tool_call>",)]
    tokenizer = byte_tokenizer(more_special=(*marks, "<|end|>"))
    compiler = InProcessCompiler(backend, tmp_path, tokenizer, [EOS_ID])
    reply = ""
    front = make_front(
        lambda _: reply,
        tools=name,
        reasoning=reasoning,
        engine_options={"tokenizer": tokenizer},
    )
    front.engine.client.grammars = compiler
    for seed, parallel in ((1, False), (2, True)):
        fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
        assert (await front.chat(**fields)).status_code == 200
        reply = thoughts + drawn(compiler, front.engine.requests[-1].grammar, seed)
        (whole,) = (await front.chat(**fields)).json()["choices"]
        assert whole["finish_reason"] == "tool_calls"
        calls = [each["function"] for each in whole["message"]["tool_calls"]]
        assert calls
        assert parallel or len(calls) == 1
        assert not whole["message"]["content"]
        assert whole["message"]["reasoning_content"] == ("hm" if thoughts else None)
        for call in calls:
            assert call["name"] == "plan" or choice == "required"
            jsonschema.validate(orjson.loads(call["arguments"]), SCHEMAS[call["name"]])
        choices = [
            each
            for event in events_of(await front.chat(stream=True, **fields))
            for each in event["choices"]
        ]
        assert joined([each["delta"] for each in choices]) == calls
        assert not "".join(each["delta"].get("content") or "" for each in choices)
        assert choices[-1]["finish_reason"] == "tool_calls"
