"""Earlier calls are rendered in the next turn on every wire, whatever their arguments are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.support.fake_engine import EOS_ID, byte_tokenizer
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.grammar_walk import InProcessCompiler

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


# As Mistral's and Kimi's templates have it.
NINE = """{%- for m in messages %}{%- if m.role == 'tool' %}
{%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- '[TOOL_RESULTS]' + m.tool_call_id + '|' + m.content }}{%- elif m.tool_calls %}
{{- '[TOOL_CALLS]' }}{%- for c in m.tool_calls %}
{%- if c.id is not defined or c.id | length != 9 %}
{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{%- endif %}
{{- c.function.name + '|' + c.id + '|' }}{%- endfor %}{%- else %}{{- m.content }}{%- endif %}
{%- endfor %}"""
KIMI = """{%- for m in messages %}{%- if m.role == 'tool' %}
{{- '## Return of ' + m.tool_call_id + '\\n' + m.content }}{%- elif m.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
{{- c.function.arguments | tojson + '<|tool_call_end|>' }}{%- endfor %}
{{- '<|tool_calls_section_end|>' }}{%- else %}{{- m.content }}{%- endif %}{%- endfor %}"""
NINE_ID = re.compile(r"[a-zA-Z0-9]{9}")


def session(*turns: list[tuple[str | None, str]], named: bool = False) -> list[dict[str, Any]]:
    """Turns of calls, ids and names, each answered in the order in which they were made."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]
    for turn in turns:
        calls = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for call_id, name in turn
        ]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        for call_id, name in turn:
            answer = {"role": "tool", "tool_call_id": call_id, "content": f"<{name}>"}
            messages.append({**answer, "name": name} if named else answer)
    return messages


async def prompt_for(front: Any, messages: list[dict[str, Any]]) -> str:
    answer = await front.post("/v1/chat/completions", {"messages": messages})
    assert answer.status_code == 200, answer.text
    return prompt_of(front)


@pytest.mark.parametrize(
    "turns",
    [
        [[("call_0123456789abcdef", "f")]],
        [[("call_1", "f"), ("call_2", "g")], [("call_3", "f")]],
        [[("call_0", "f"), ("call_0", "g")], [("call_0", "f")]],
        [[(None, "f"), (None, "g")], [(None, "f")]],
        [[("functions.f:0", "f"), ("toolu_01", "g")], [("", "f")]],
    ],
)
@pytest.mark.parametrize("parser", ["mistral", None])
async def test_mistrals_ids_are_nine_letters_or_digits(
    make_front: Any, turns: list[list[tuple[str | None, str]]], parser: str | None
) -> None:
    # Without a parser the template tells whose ids these are.
    front = make_front(template=NINE, tools=parser)
    prompts = [
        await prompt_for(front, session(*turns[:count], named=named))
        for count in range(1, len(turns) + 1)
        for named in (False, True)
    ]
    assert prompts[0] == prompts[1]
    # What follows changes nothing before it, so that the cache keeps it.
    assert prompts[-1].startswith(prompts[0])
    called = re.findall(r"(\w)\|(\w+)\|", prompts[-1])
    returned = re.findall(r"\[TOOL_RESULTS\](\w+)\|<(\w)>", prompts[-1])
    assert sorted(called) == sorted((name, call_id) for call_id, name in returned)
    assert all(NINE_ID.fullmatch(call_id) for _, call_id in called)


async def test_ids_of_the_form_stay(make_front: Any) -> None:
    assert "f|a1B2c3D4e|" in await prompt_for(
        make_front(template=NINE, tools="mistral"), session([("a1B2c3D4e", "f")])
    )
    shown = await prompt_for(make_front(template=NINE), session([("toolu_a1B2c3D4e", "f")]))
    assert "f|a1B2c3D4e|" in shown
    kimi = make_front(template=KIMI, tools="kimi_k2")
    assert "## Return of functions.f:7\n" in await prompt_for(
        kimi, session([("functions.f:7", "f")])
    )
    # Families that take any id get the one that was sent.
    template = "{% for m in messages %}{{ m.tool_call_id or '' }}{% endfor %}"
    shown = await prompt_for(make_front(template=template, tools="hermes"), session([("x y", "f")]))
    assert shown == "x y"


async def test_results_find_their_calls_in_any_order(make_front: Any) -> None:
    messages = session([("one", "f"), ("two", "g")])
    messages[2:] = reversed(messages[2:])
    prompt = await prompt_for(make_front(template=KIMI, tools="kimi_k2"), messages)
    assert "<|tool_call_begin|>functions.f:0<|" in prompt
    assert "## Return of functions.g:1\n<g>## Return of functions.f:0\n<f>" in prompt


async def test_kimis_ids_count_the_calls_of_the_conversation(make_front: Any) -> None:
    front = make_front(template=KIMI, tools="kimi_k2")
    turns = [[("call_a", "f"), ("call_b", "f")], [("call_c", "g")]]
    prompt = await prompt_for(front, session(*turns))
    called = re.findall(r"<\|tool_call_begin\|>([^<]+)<", prompt)
    assert called == ["functions.f:0", "functions.f:1", "functions.g:2"]
    assert re.findall(r"## Return of (\S+)\n", prompt) == called


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FORCED = '[{"name": "f", "parameters": {}}, {"name": "f", "parameters": {}}]'


@needs_grammars
@pytest.mark.parametrize(
    ("parser", "template", "written", "choice", "expected"),
    [
        ("mistral", NINE, '[TOOL_CALLS][{"name": "f", "arguments": {}}]', "auto", [NINE_ID]),
        ("mistral", NINE, "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", "auto", ["abcdefghi"]),
        ("mistral", NINE, "[TOOL_CALLS]f[CALL_ID]long_and_odd[ARGS]{}", "auto", [NINE_ID]),
        ("mistral", NINE, FORCED, "required", [NINE_ID, NINE_ID]),
        (None, NINE, FORCED, "required", [NINE_ID, NINE_ID]),
        ("kimi_k2", KIMI, FORCED, "required", ["functions.f:1", "functions.f:2"]),
        (
            "kimi_k2",
            KIMI,
            "<|tool_call_begin|>f:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
            "auto",
            ["functions.f:1"],
        ),
        ("hermes", TEMPLATES["json"], FORCED, "required", ["call_", "call_"]),
    ],
)
async def test_answers_have_ids_of_the_form(
    make_front: Any,
    parser: str | None,
    template: str,
    written: str,
    choice: str,
    expected: list[Any],
    tmp_path: Path,
) -> None:
    front = make_front(lambda _: written, template=template, tools=parser)
    if choice == "required":
        compiler = InProcessCompiler(BACKENDS[0], tmp_path, byte_tokenizer(), [EOS_ID])
        front.engine.client.grammars = compiler
    messages = session([("a1B2c3D4e", "f")])
    body = {"messages": messages, "tools": [TOOL], "tool_choice": choice}
    (answer,) = (await front.post("/v1/chat/completions", body)).json()["choices"]
    ids = [call["id"] for call in answer["message"]["tool_calls"]]
    assert len(ids) == len(expected)
    for call_id, form in zip(ids, expected, strict=True):
        assert form.fullmatch(call_id) if form is NINE_ID else call_id.startswith(form)
    # And the answer comes back as the next turn has it.
    results = [{"role": "tool", "tool_call_id": each, "content": "done"} for each in ids]
    await prompt_for(front, [*messages, answer["message"], *results])


async def test_ids_of_messages_come_back_as_the_model_wrote_them(make_front: Any) -> None:
    front = make_front(
        lambda _: "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", template=NINE, tools="mistral"
    )
    asked = {"role": "user", "content": "Go"}
    body = {"model": "m", "max_tokens": 99, "tools": [{"name": "f", "input_schema": {}}]}
    answer = (await front.post("/v1/messages", {**body, "messages": [asked]})).json()
    (block,) = answer["content"]
    assert block["id"] == "toolu_abcdefghi"
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "done"}
    turns = [
        asked,
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result]},
    ]
    await front.post("/v1/messages", {**body, "messages": turns})
    assert "f|abcdefghi|[TOOL_RESULTS]abcdefghi|done" in prompt_of(front)
