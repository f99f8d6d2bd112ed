"""Calls that a model made come back in the next turn, whatever it wrote, on every wire."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_TURNS = """{%- for m in messages %}{{- '[' + m.role + ']' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{%- set f = c.function %}CALL{%- endfor %}
{%- endfor %}"""
# How the families' templates write a call.
WRITES = {
    "hermes": "{{- '<call>' + f.name }}{%- if f.arguments is string %}{{- f.arguments }}"
    "{%- else %}{{- f.arguments | tojson }}{%- endif %}",
    "json": "{{- '<call>' + f.name }}{{- f.arguments | tojson }}",
    "items": "{{- '<call>' + f.name }}{%- for k, v in f.arguments.items() %}"
    "{{- '<k>' + k + '<v>' ~ v }}{%- endfor %}",
    "filter": "{{- '<call>' + f.name }}{%- for k, v in f.arguments | items %}"
    "{{- '<k>' + k + '<v>' ~ v }}{%- endfor %}",
    "text": "{{- '<call>' + f.name + '\\n' + f.arguments + '\\n' }}",
    "mapping": "{%- if f.arguments is not mapping %}{{- raise_exception('no mapping') }}"
    "{%- endif %}{{- '<call>' + f.name }}{{- f.arguments | tojson }}",
}
TEMPLATES = {name: _TURNS.replace("CALL", write) for name, write in WRITES.items()}
# What was sent, and what a template reads that takes it as it is.
NOTHING = (None, "", " \n", "null")
ARGUMENTS: list[tuple[Any, Any]] = [
    ('{"path": "/a b", "n": [1, {"x": null}]}', {"path": "/a b", "n": [1, {"x": None}]}),
    ({"path": "/a"}, {"path": "/a"}),
    ('{"path', '{"path'),
    ('{"path": "/etc", "content": "half', '{"path": "/etc", "content": "half'),
    ("plain words", "plain words"),
    ('["a", 1]', '["a", 1]'),
    (["ä", 1], '["ä", 1]'),
    (5, "5"),
    (True, "true"),
    *((nothing, {}) for nothing in NOTHING),
    ('{"a": NaN}', '{"a": NaN}'),
    ('{"a": 1e999}', '{"a": 1e999}'),
    ("[" * 5000, "[" * 5000),
    (12345678901234567890123, "12345678901234567890123"),
]


def reference(source: str, messages: list[dict[str, Any]]) -> str | None:
    """The prompt as `transformers` renders it; `None` where the template takes no such messages."""
    try:
        rendered, _ = render_jinja_template(
            conversations=[messages], chat_template=source, **TOKENS
        )
    except Exception:
        return None
    return str(rendered[0])


def history(arguments: Any, call_id: str = "call_1") -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "done"},
    ]


def as_sent(wire: str, arguments: Any) -> tuple[str, dict[str, Any]]:
    """The same conversation in the form of each wire."""
    match wire:
        case "chat":
            return "/v1/chat/completions", {"messages": history(arguments)}
        case "function_call":
            messages = history(arguments)
            (call,) = messages[1].pop("tool_calls")
            messages[1]["function_call"] = call["function"]
            messages[2] = {"role": "function", "name": "f", "content": "done"}
            return "/v1/chat/completions", {"messages": messages}
        case "responses":
            call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
            output = {"type": "function_call_output", "call_id": "c", "output": "done"}
            return "/v1/responses", {"input": [{"role": "user", "content": "Go"}, call, output]}
        case "messages":
            called = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": arguments}
            result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}
            messages = [
                {"role": "user", "content": "Go"},
                {"role": "assistant", "content": [called]},
                {"role": "user", "content": [result]},
            ]
            return "/v1/messages", {"model": "m", "max_tokens": 9, "messages": messages}
    function = {"function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": "", "tool_calls": [function]},
        {"role": "tool", "content": "done", "tool_name": "f"},
    ]
    return "/api/chat", {"model": "m", "messages": messages, "stream": False}


def prompt_of(front: Any) -> str:
    ids = np.frombuffer(front.engine.requests[-1].input_ids, dtype=np.int32)
    text: str = front.engine.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    return text


@pytest.mark.parametrize("wire", ["chat", "function_call", "responses", "messages", "ollama"])
@pytest.mark.parametrize("name", TEMPLATES)
async def test_arguments_come_back_whatever_they_are(make_front: Any, name: str, wire: str) -> None:
    front = make_front(template=TEMPLATES[name], engine_options={"context_len": 65536})
    for sent, read in ARGUMENTS:
        path, body = as_sent(wire, sent)
        answer = await front.post(path, body)
        assert answer.status_code == 200, (sent, answer.text)
        # Templates that want text get what was sent, those that want an object get one.
        as_text = json.dumps(read) if sent in NOTHING or isinstance(sent, dict) else sent
        shapes = (read, as_text if isinstance(read, dict) else {"arguments": read})
        expected = [reference(TEMPLATES[name], history(shape)) for shape in shapes]
        assert prompt_of(front) == next(each for each in expected if each is not None)


async def test_one_call_a_message_where_the_template_knows_no_more(make_front: Any) -> None:
    one = "{%- if m.tool_calls and m.tool_calls | length != 1 %}"
    one += "{{- raise_exception('one call at once') }}{%- endif %}"
    front = make_front(template=TEMPLATES["json"].replace("{{- '['", one + "{{- '['", 1))
    calls = [
        {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in ("one", "two")
    ]
    results = [
        {"role": "tool", "tool_call_id": name, "content": f"from {name}"} for name in ("two", "one")
    ]
    asked = {"role": "user", "content": "Go"}
    messages = [asked, {"role": "assistant", "content": "Two.", "tool_calls": calls}, *results]
    answer = await front.post("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert prompt_of(front) == (
        "[user]Go[assistant]Two.<call>one{}[tool]from one[assistant]<call>two{}[tool]from two"
    )
