"""Parsers made from a checkpoint's `response_template` read what `transformers` reads with it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_parsing import parse_response

from openai_api.output_parser import (
    Call,
    ContentText,
    OutputEvent,
    OutputParser,
    ReasoningText,
    WholeCalls,
)
from openai_api.parser_choice import choose_parsers
from openai_api.parsers import DESCRIBED, ParserSet
from tests.support.model_outputs import FUNCTIONS, SEARCH, WEATHER, dumps

CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
MAGISTRAL = {"open": "[THINK]", "close": "[/THINK]", "content": "text"}
OTHER_KEYS = {
    "open": "<call>",
    "close": "</call>",
    "content": "json",
    "repeats": True,
    "transform": {
        "type": "function",
        "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
    },
}
NAME_BEFORE = {
    "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+)[^<]*<\|message\|>",
    "close": ["<|call|>", "<|end|>"],
    "content": "json",
    "repeats": True,
    "transform": CALL,
}
LIST = {
    "open": "[TOOLS]",
    "close_pattern": r"\[/TOOLS\]\s*",
    "content": "json",
    "transform_each": True,
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
}
XML = {
    "open_pattern": r"<calls>\s*<fn=(?P<name>[^>\n]+)>\s*",
    "close_pattern": r"</fn>\s*</calls>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<arg=(?P<key>\w+)>\n(?P<value>.*?)\n</arg>"},
    "repeats": True,
    "transform": CALL,
}
KEY_VALUE = {
    "open_pattern": r"<calls>(?P<name>\w+)",
    "close": "</calls>",
    "content": "xml-inline",
    "content_args": {"tag_pattern": r"<k>(?P<key>\w+)</k>\s*<v>(?P<value>.*?)</v>"},
    "repeats": True,
    "transform": CALL,
}


def call_json(**fields: Any) -> str:
    return dumps(fields)


OUTPUTS: list[tuple[dict[str, Any], str]] = [
    (
        {"tool_calls": OTHER_KEYS},
        f"Well.<call>{call_json(name='get_weather', parameters=WEATHER)}</call>"
        f"<call>\n{call_json(name='search', parameters=SEARCH)}\n</call>",
    ),
    (
        {"tool_calls": NAME_BEFORE, "thinking": MAGISTRAL},
        f"[THINK]Hm [x] ß.[/THINK]<|channel|>commentary to=functions.search json<|message|>"
        f"{dumps(SEARCH)}<|call|>",
    ),
    (
        {"tool_calls": LIST},
        f"[TOOLS][{call_json(name='now', arguments={})}, "
        f"{call_json(name='search', arguments=SEARCH)}][/TOOLS]",
    ),
    (
        {"tool_calls": XML, "thinking": MAGISTRAL},
        "[THINK]One.\n[/THINK]Two.<calls>\n<fn=get_weather>\n<arg=city>\nZürich\n</arg>\n"
        "<arg=days>\n3\n</arg>\n<arg=hourly>\ntrue\n</arg>\n</fn>\n</calls>",
    ),
    (
        {"tool_calls": KEY_VALUE},
        "<calls>get_weather<k>city</k>\n<v>Oslo</v><k>days</k><v>2</v></calls>",
    ),
    ({"thinking": MAGISTRAL}, "[THINK]Only thoughts.[/THINK]And text."),
]


def template(fields: dict[str, Any]) -> dict[str, Any]:
    # As `transformers` wants it: what is left over is content.
    return {"start_anchor": "\x00", "fields": {**fields, "content": {}}}


def parser_of(fields: dict[str, Any]) -> OutputParser:
    names = choose_parsers("auto", "auto", None, template(fields))
    assert names.tools == (DESCRIBED if "tool_calls" in fields else None)
    assert names.reasoning == (DESCRIBED if "thinking" in fields else None)
    parsers = ParserSet.choose(names.reasoning, names.tools, None, names.described)
    return parsers.make(
        prompt_is_open=False,
        separate_reasoning=True,
        stream_reasoning=True,
        functions=FUNCTIONS,
        max_calls=None,
    )


@pytest.mark.parametrize(("fields", "text"), OUTPUTS)
@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_it_reads_what_transformers_reads(fields: dict[str, Any], text: str, size: int) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in FUNCTIONS.items()
    ]
    expected = parse_response(text, template(fields), prefix="", tools=tools)
    parser = parser_of(fields)
    events: list[OutputEvent] = []
    for at in range(0, len(text), size):
        events += parser.feed(text[at : at + size])
    parts = list(WholeCalls().feed(events + parser.finish()))
    calls = [
        {
            "type": "function",
            "function": {"name": part.name, "arguments": json.loads(part.arguments)},
        }
        for part in parts
        if isinstance(part, Call)
    ]
    thoughts = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    content = "".join(part.text for part in parts if isinstance(part, ContentText))
    assert calls == expected.get("tool_calls", [])
    assert thoughts == expected.get("thinking", "")
    assert content == expected.get("content", "")


@pytest.mark.parametrize(
    "described",
    [
        {**OTHER_KEYS, "content_args": {"unquoted_keys": True}},
        {**OTHER_KEYS, "transform": {"function": {"name": "{content.tool}", "arguments": "{x}"}}},
        {**OTHER_KEYS, "transform": "{content.calls}"},
        {**OTHER_KEYS, "open": []},
        {**NAME_BEFORE, "open_pattern": r"(?:a|b)(?P<name>\w+)"},
        {**NAME_BEFORE, "open_pattern": r"(?P<name>\w+)\("},
        {**NAME_BEFORE, "open_pattern": r"((((" * 100},
        {**NAME_BEFORE, "open_pattern": 5},
        {**NAME_BEFORE, "open_pattern": "x" * 1000},
        {**XML, "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\1>"}},
        {**XML, "content_args": None},
        {**XML, "close_pattern": "a|b"},
        {"open": "<c>", "content": "kv-lines"},
        {"content": ["json"]},
    ],
)
def test_what_no_machine_of_ours_reads_is_left_to_the_chat_template(described: Any) -> None:
    names = choose_parsers("auto", "auto", None, template({"tool_calls": described}))
    assert names.tools is None
