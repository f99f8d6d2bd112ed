"""The parsers that `auto` finds, for templates as the families write them."""

# ruff: noqa: E501  # Lines of templates are as long as they are.

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.demo import MODEL_PATH
from openai_api.chat_template import ChatTemplate
from openai_api.openai_context import make_context
from openai_api.parser_choice import ParserNames, choose_parsers
from openai_api.tool_parsers.registry import TOOL_PARSERS
from runtime.text.tokenizer import Tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.fake_service import fake_service

TEMPLATES = Path(__file__).resolve().parents[2] / "support" / "chat_templates"
# The call is put together from pieces, and the quotes are escaped.
PIECES = """
{%- if tools %}{{ "Call so: " }}{{- "<tool_call>\\n" }}
{{- "{\\"name\\": <name>, \\"arguments\\": <arguments>}" }}{{ "</tool_call>" }}{% endif %}
"""
# Tags of the same name around something that is not JSON.
XML = "{{ '<tool_call>' + name + '<arg_key>' }}{{ '<think>' + text + '</think>' }}"
FUNCTION = "{{ '<tool_call>\\n<function=' + call.name + '>' }}{{ call.arguments }}"
# What each family's own template writes around calls and thoughts, in its pieces.
EXCERPTS = {
    ("qwen3", "qwen3_coder"): """
{{- "<tools>" }}{{- '- Function calls MUST follow the format: an inner <function=...></function>' }}
{%- if message.reasoning_content %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}{{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
{{- '<parameter=' + args_name + '>\\n' }}{{- args_value }}{{- '\\n</parameter>\\n' }}
{{- '</function>\\n</tool_call>' }}""",
    ("glm45", "glm45"): """
For each function call, output the function name and arguments within the following XML format:
<tool_call>{function-name}
<arg_key>{arg-key-1}</arg_key>
<arg_value>{arg-value-1}</arg_value>
</tool_call>{{ '\\n<think></think>' }}
{{ '\\n<tool_call>' + tc.name }}{% for k, v in args.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{% endfor %}""",
    ("qwen3", "deepseekv3"): """
{%- if not ns.is_first %}{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type']
 + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + arguments + '\\n' + '```'
 + '<｜tool▁call▁end｜>'}}{%- endif %}{% set content = content.split('</think>')[-1] %}
{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}""",
    ("qwen3", "deepseekv31"): """
{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>' +
 tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}{%- if not thinking %}{{'</think>'}}{%- endif %}""",
    (None, "kimi_k2"): """
{%- macro render_toolcalls(message) -%}<|tool_calls_section_begin|>{%- for tool_call in calls -%}
{%- set formatted_id = tool_call['id'] -%}<|tool_call_begin|>{{ formatted_id }}
<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|>{%- endfor -%}
<|tool_calls_section_end|>{%- endmacro -%}""",
    ("kimi_k2", "kimi_k2"): """
<think>{{ reasoning }}</think>{{ text }}<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}
<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|><|tool_calls_section_end|>""",
    ("kimi", None): "{%- if thinks -%}◁think▷{{ thoughts }}◁/think▷{%- endif -%}{{ text }}",
    ("qwen3", "minimax-m2"): """
{%- set toolcall_begin_token = '<minimax:tool_call>' -%}
{{- '<think>' ~ '\\n' ~ reasoning ~ '\\n' ~ '</think>' ~ '\\n\\n' }}{{- toolcall_begin_token ~ '\\n' }}
{{- '<invoke name="' + name + '">' }}{{- '<parameter name="' ~ k ~ '">' }}{{- v }}
{{- '</parameter>' }}{{- '</invoke>\\n' }}""",
    ("gpt-oss", "gpt-oss"): """
{{- "# Valid channels: analysis, commentary, final. Channel must be included for every message." }}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
{{- "<|start|>assistant to=" }}{{- "functions." + tool_call.name }}{{- "<|channel|>commentary " }}
{{- "json<|message|>" }}{{- tool_call.arguments | tojson }}{{- "<|call|>" }}""",
    (None, "mistral"): """
{{- "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}
{%- for tool in calls %}{{- '[TOOL_CALLS]' + tool.name + '[ARGS]' }}{{- arguments }}{%- endfor %}""",
    (None, "llama3"): """
{{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.' }}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{{- "<|python_tag|>" + code }}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- arguments | tojson }}""",
    (None, "pythonic"): """
{{- "put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...)]" }}""",
}
CUTS_REASONING = "{{ message.content.split('</think>')[-1] }}"
HERMES: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {"open": ["<tool_call>", "<call>"], "close": "x", "content": "json"},
        "content": {},
    },
}


def chosen(
    source: str | None,
    response: Any = None,
    reasoning: str | None = "auto",
    tools: str | None = "auto",
) -> ParserNames:
    template = None if source is None else ChatTemplate(source)
    return choose_parsers(reasoning, tools, template, response or {})


@pytest.mark.parametrize(
    ("name", "reasoning", "tools"),
    [
        ("qwen3", "qwen3", "hermes"),
        ("llama3", None, "llama3"),
        ("mistral", None, None),
        ("parts", None, None),
    ],
)
def test_templates_of_families(name: str, reasoning: str | None, tools: str | None) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    assert chosen(source) == ParserNames(reasoning, tools)


@pytest.mark.parametrize(("names", "source"), EXCERPTS.items())
def test_excerpts_of_templates(names: tuple[str | None, str | None], source: str) -> None:
    assert chosen(source) == ParserNames(*names)


def test_every_parser_that_is_recognised_has_an_excerpt() -> None:
    shown = {tools for _, tools in EXCERPTS} | {"hermes"}
    assert {TOOL_PARSERS.load(name) for name in shown if name} == {
        TOOL_PARSERS.load(name) for name in TOOL_PARSERS
    }


def test_the_demo_model() -> None:
    template = Tokenizer.from_folder(Path(MODEL_PATH)).chat_template
    assert isinstance(template, str)
    assert chosen(template) == ParserNames("qwen3", "hermes")


@pytest.mark.parametrize(
    ("source", "reasoning", "tools"),
    [
        (PIECES, None, "hermes"),
        (XML, "qwen3", None),
        (FUNCTION, None, None),
        (CUTS_REASONING, "qwen3", None),
        ("{{ messages }}", None, None),
        ('{# <tool_call> "name": "arguments": </think> #}', None, None),
    ],
)
def test_signs(source: str, reasoning: str | None, tools: str | None) -> None:
    assert chosen(source) == ParserNames(reasoning, tools)


def test_a_response_template_comes_first() -> None:
    assert chosen("{{ messages }}", HERMES) == ParserNames("qwen3", "hermes")
    fields = HERMES["fields"]
    renamed = {"reasoning_content": fields["thinking"], "tool_calls": fields["tool_calls"]}
    assert chosen("{{ messages }}", {"fields": renamed}) == ParserNames("qwen3", "hermes")
    other = {"tool_calls": {**fields["tool_calls"], "content": "xml-inline"}}
    assert chosen("{{ messages }}", {"fields": other}) == ParserNames(None, None)


@pytest.mark.parametrize(
    "response",
    [
        {"fields": None},
        {"fields": []},
        {"fields": {"tool_calls": None, "thinking": 5}},
        {"fields": {"tool_calls": {"open": None, "content": {}}, "thinking": {"open": [[]]}}},
    ],
)
def test_a_response_template_that_says_nothing(response: Any) -> None:
    assert chosen("{{ messages }}", response) == ParserNames(None, None)


def test_options_win_and_none_turns_off(caplog: pytest.LogCaptureFixture) -> None:
    source = (TEMPLATES / "qwen3.jinja").read_text()
    assert chosen(source, HERMES, "none", "none") == ParserNames(None, None)
    assert chosen(source, HERMES, "deepseek-r1", "qwen") == ParserNames("deepseek-r1", "qwen")
    # What programs pass that name every argument.
    assert chosen(source, {}, None, None) == ParserNames("qwen3", "hermes")
    with caplog.at_level(logging.INFO):
        chosen(source)
        chosen(source, HERMES, "none")
        chosen("{{ messages }}")
        chosen(None)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert "tool_call_parser: hermes (the chat template has <tool_call>" in lines[0]
    assert "reasoning_parser: qwen3 (the chat template has </think>)" in lines[0]
    assert "tool_call_parser: hermes (the response template describes it)" in lines[1]
    assert "reasoning_parser: none (as asked)" in lines[1]
    assert lines[2].count("none (the chat template shows no known form)") == 2


def test_tools_may_have_a_template_of_their_own() -> None:
    named = {"default": "{{ messages }}", "tool_use": (TEMPLATES / "qwen3.jinja").read_text()}
    assert choose_parsers("auto", "auto", ChatTemplate(named), {}).tools == "hermes"


def test_the_folder_says_how_answers_are_written(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(Path(MODEL_PATH))
    assert tokenizer.response_template == {}
    for written, read in ((HERMES, HERMES), ("text", {}), ([], {})):
        config = {"response_template": written}
        assert Tokenizer(tokenizer.backend, config).response_template == read


def test_contexts_leave_the_options_alone(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_folder(Path(MODEL_PATH))
    service = fake_service(FakeEngine(tokenizer=tokenizer))
    before = service.config
    with caplog.at_level(logging.INFO):
        contexts = [make_context(service) for _ in range(2)]
    assert service.config is before
    lines = [line for line in caplog.messages if "tool_call_parser" in line]
    assert len(lines) == 2
    # The second one finds the parsers as the first did, and not what that had left for it.
    assert lines[0] == lines[1]
    for context in contexts:
        assert context.parser_names.as_options == {
            "reasoning_parser": "qwen3",
            "tool_call_parser": "hermes",
        }
    with pytest.raises(dataclasses.FrozenInstanceError):
        service.config = before  # type: ignore[misc]  # on purpose
