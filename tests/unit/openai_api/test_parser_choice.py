"""The parsers that `auto` finds, for templates as the families write them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from headrace.demo import MODEL_PATH
from openai_api.chat_template import ChatTemplate
from openai_api.parser_choice import ParserNames, choose_parsers
from runtime.text.tokenizer import Tokenizer

TEMPLATES = Path(__file__).resolve().parents[2] / "support" / "chat_templates"
# The call is put together from pieces, and the quotes are escaped.
PIECES = """
{%- if tools %}{{ "Call so: " }}{{- "<tool_call>\\n" }}
{{- "{\\"name\\": <name>, \\"arguments\\": <arguments>}" }}{{ "</tool_call>" }}{% endif %}
"""
# Tags of the same name around something that is not JSON.
XML = "{{ '<tool_call>' + name + '<arg_key>' }}{{ '<think>' + text + '</think>' }}"
FUNCTION = "{{ '<tool_call>\\n<function=' + call.name + '>' }}{{ call.arguments }}"
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


def test_the_demo_model() -> None:
    template = Tokenizer.from_folder(Path(MODEL_PATH)).chat_template
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
    assert lines[2].count("none (the chat template shows no form that is known)") == 2


def test_tools_may_have_a_template_of_their_own() -> None:
    named = {"default": "{{ messages }}", "tool_use": (TEMPLATES / "qwen3.jinja").read_text()}
    assert choose_parsers("auto", "auto", ChatTemplate(named), {}).tools == "hermes"


def test_the_folder_says_how_answers_are_written(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(Path(MODEL_PATH))
    assert tokenizer.response_template == {}
    for written, read in ((HERMES, HERMES), ("text", {}), ([], {})):
        config = {"response_template": written}
        assert Tokenizer(tokenizer.backend, config).response_template == read
