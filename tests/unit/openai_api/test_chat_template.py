"""Rendering equals `transformers`; and no template, however hostile, hangs or floods."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from openai_api.chat_template import ChatTemplate, load_chat_template
from runtime.errors import InvalidRequest, StartupError

FOLDER = Path(__file__).parents[2] / "support" / "chat_templates"
QWEN3, LLAMA3, MISTRAL, PARTS = (
    (FOLDER / f"{name}.jinja").read_text() for name in ("qwen3", "llama3", "mistral", "parts")
)
SOURCES = {"qwen3": QWEN3, "llama3": LLAMA3, "mistral": MISTRAL, "parts": PARTS}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather <now> & 'later' in ä city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "ping", "parameters": {}}},
]
SIMPLE = [
    {"role": "system", "content": "  Be kind.\n"},
    {"role": "user", "content": 'Hi <b>there</b> & "you" 日本'},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello.  "},
    {"role": "user", "content": "More"},
]
CALLS = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I should look.",
        "tool_calls": [
            {
                "type": "function",
                "id": "call_1",
                "function": {"name": "get_weather", "arguments": {"city": "Köln", "n": 1.5}},
            }
        ],
    },
    {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
]
WITH_PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    {"role": "assistant", "content": "c"},
]


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
        conversations=[messages], chat_template=source, **{**TOKENS, **options}
    )
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("name", ["qwen3", "llama3", "mistral", "parts"])
@pytest.mark.parametrize(
    "messages", [SIMPLE, CALLS, WITH_PARTS, SIMPLE[1:2]], ids=["simple", "calls", "parts", "one"]
)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
def test_equals_transformers(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool
) -> None:
    source = SOURCES[name]
    template = ChatTemplate(source, TOKENS)
    try:
        expected = reference(source, messages, tools=tools, add_generation_prompt=prompt)
    except Exception:
        # Only where the template itself is not made for such messages.
        assert name in ("mistral", "llama3")
        with pytest.raises(InvalidRequest):
            template.render(messages, tools=tools, add_generation_prompt=prompt)
        return
    assert template.render(messages, tools=tools, add_generation_prompt=prompt) == expected


def test_variables_reach_the_template() -> None:
    template = ChatTemplate(QWEN3, TOKENS)
    text = template.render(SIMPLE, variables={"enable_thinking": False, "not_read": 1})
    assert text == reference(QWEN3, SIMPLE, add_generation_prompt=True, enable_thinking=False)
    assert text.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["qwen3", "llama3", "parts"])
@pytest.mark.parametrize("start", ["Once upon", "Once upon a \n", "Once"])
def test_continuing_the_last_message_equals_transformers(name: str, start: str) -> None:
    source = SOURCES[name]
    messages = [*SIMPLE, {"role": "assistant", "content": start}]
    text = ChatTemplate(source, TOKENS).render(messages, continue_final_message=True)
    assert text == reference(source, messages, continue_final_message=True)
    assert text.rstrip().endswith(start.rstrip())


def test_templates_own_message_reaches_the_user() -> None:
    messages = [{"role": "assistant", "content": "me first"}]
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate(MISTRAL, TOKENS).render(messages)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "chat_template"])
def test_the_servers_variables_cannot_be_replaced(name: str) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
        ChatTemplate(QWEN3, TOKENS).render(SIMPLE, variables={name: []})


def test_content_format_detection() -> None:
    parts = {
        name: ChatTemplate(SOURCES[name]).choose(with_tools=False).reads_parts
        for name in ("qwen3", "llama3", "mistral", "parts")
    }
    assert parts == {"qwen3": False, "llama3": False, "mistral": False, "parts": True}
    direct = (
        "{% for m in messages %}{% for c in m['content'] %}{{ c.text }}{% endfor %}{% endfor %}"
    )
    assert ChatTemplate(direct).choose(with_tools=False).reads_parts


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        # These two need the five seconds of a rendering in a process of its own.
        pytest.param(
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{% set r = range(99999)|list %}{% for i in r %}{% for j in r %}{% set x = 1 %}"
            "{% endfor %}{% endfor %}",
            marks=pytest.mark.slow,
        ),
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ 2 ** (10**9) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ [0] * 10**10 }}",
        "{% macro f(n) %}{{ f(n) ~ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
        "{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}"
        "{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ lipsum(10**6) }}",
        "{{ undefined_thing.attribute }}",
        "{{ 1 / 0 }}",
    ],
)
def test_hostile_templates_are_bounded(source: str) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, timeout_s=0.3).render(SIMPLE, max_chars=100_000)
    assert time.thread_time() - started < 3
    assert "object at" not in caught.value.message


def test_tools_as_bare_functions_are_the_second_try() -> None:
    source = "{% for tool in tools %}{{ tool.name + ' ' }}{% endfor %}"
    assert ChatTemplate(source).render(SIMPLE, tools=TOOLS) == "get_weather ping "


def test_sources(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("from file {{ messages|length }}")
    loaded = load_chat_template(str(path), "own", {})
    assert loaded is not None
    assert loaded.render(SIMPLE) == "from file 4"
    inline = load_chat_template("{{ 'inline' }}", "own", {})
    assert inline is not None
    assert inline.render(SIMPLE) == "inline"
    assert load_chat_template(None, None, {}) is None
    with pytest.raises(StartupError, match="no such file"):
        load_chat_template("nowhere.jinja", None, {})
    with pytest.raises(StartupError, match="does not parse"):
        load_chat_template("{% if %}", None, {})
    named = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert named.render(SIMPLE) == "plain"
    assert named.render(SIMPLE, tools=TOOLS) == "tools"


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama-3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHo<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma",
            "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n"
            "<start_of_turn>model\nHo<end_of_turn>\n"
            "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        ),
    ],
)
def test_named_templates(name: str, text: str) -> None:
    template = load_chat_template(name, None, {"bos_token": "<s>"})
    assert template is not None
    assert template.render(TURNS) == text
    # None needs a process with limits.
    assert template.choose(with_tools=False).doubt is None
