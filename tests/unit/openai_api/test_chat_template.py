"""Rendering equals `transformers`, and hostile templates cannot hang or flood the server."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from openai_api.chat_messages import TemplateShape, template_messages
from openai_api.chat_template import ChatTemplate, load_chat_template
from openai_api.schemas.chat import ChatMessage, ContentPart, FunctionCall, ToolCall
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


# As SmolVLM and Idefics 3 have it.
SMOL = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# As GLM-4.1V: parts of users, texts of all others.
GLM = (
    "[gMASK]<sop>{%- for msg in messages %}{%- if msg.role == 'system' %}\n<|system|>\n"
    "{{ msg.content }}{%- elif msg.role == 'user' %}<|user|>{{ '\\n' }}"
    "{%- for item in msg.content %}{%- if item.type == 'image' %}<|image|>"
    "{%- elif item.type == 'text' %}{{ item.text }}{%- endif %}{%- endfor %}"
    "{%- elif msg.role == 'assistant' %}<|assistant|>\n{{ msg.content }}"
    "{%- elif msg.role == 'tool' %}<|observation|>\n{{ msg.content }}{%- endif %}{% endfor -%}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As Llama 3.2 Vision: a tool's answer in parts would be written out as JSON.
LLAMA_VISION = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'tool' %}"
    "{% if message.content is mapping or message.content is iterable %}"
    "{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}"
    "{% elif message.content is string %}{{ message.content }}{% else %}"
    "{% for content in message.content %}{% if content.type == 'image' %}<|image|>"
    "{% elif content.type == 'text' %}{{ content.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
# As InternVL: a filter in the place of a test.
FILTERED = (
    "{% for m in messages %}{{ m.role }}: "
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    "{% endfor %}\n{% endfor %}"
)
# No loop at all.
FIRST = "{% for m in messages %}{{ m.role }}: {{ m['content'][0]['text'] }}\n{% endfor %}"
ALIAS = (
    "{% for m in messages %}{% set body = m.content %}{{ m.role }}: {% for p in body %}"
    "{{ p['text'] }}{% endfor %}\n{% endfor %}"
)
MACRO = (
    "{% macro show(body) %}{% for p in body %}{{ p.text }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ m.role }}: {{ show(m.content) }}\n{% endfor %}"
)
ROLES = ("system", "user", "assistant", "tool")
LISTS = dict.fromkeys(ROLES, "parts")
TEXTS = dict.fromkeys(ROLES, "text")
EITHER = dict.fromkeys(ROLES, "either")
FORMS = {
    "qwen3": (QWEN3, TEXTS),
    "llama3": (LLAMA3, TEXTS),
    "mistral": (MISTRAL, TEXTS),
    "parts": (PARTS, EITHER),
    "smol": (SMOL, LISTS),
    "glm": (GLM, {**TEXTS, "user": "parts"}),
    "llama vision": (LLAMA_VISION, {**EITHER, "tool": "text"}),
    "filtered": (FILTERED, LISTS),
    "first": (FIRST, LISTS),
    "alias": (ALIAS, LISTS),
    "macro": (MACRO, LISTS),
}
TOLD = [
    ChatMessage(role="system", content="Be kind."),
    ChatMessage(role="user", content=[ContentPart(type="text", text="Weather?")]),
    ChatMessage(
        role="assistant",
        tool_calls=[ToolCall(id="abcdefghi", function=FunctionCall(name="f", arguments="{}"))],
    ),
    ChatMessage(role="tool", content=[ContentPart(type="text", text="rain")], tool_call_id="a"),
    ChatMessage(role="user", content="Thanks"),
]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["bare", "tools"])
@pytest.mark.parametrize("name", FORMS)
def test_content_has_the_form_that_the_template_reads(
    name: str, tools: list[dict[str, Any]] | None
) -> None:
    source, forms = FORMS[name]
    template = ChatTemplate(source, TOKENS)
    form_of = partial(template.content_form, with_tools=tools is not None)
    assert {role: form_of(role) for role in ROLES} == forms
    messages = template_messages(TOLD, TemplateShape(form_of=form_of, knows_developer=False))
    if name == "mistral":
        # It has no place for calls.
        messages = messages[:2]
    expected = []
    for message in messages:
        content = message["content"]
        # As a person would write it down for `transformers`, by the role.
        texts = content if isinstance(content, str) else content[0]["text"]
        wanted = [{"type": "text", "text": texts}] if forms[message["role"]] == "parts" else texts
        expected.append({**message, "content": wanted})
    text = template.render(messages, tools=tools)
    assert text == reference(source, expected, tools=tools, add_generation_prompt=True)
    assert "Weather?" in text
    assert "{'type'" not in text


def test_the_log_says_what_form_content_has() -> None:
    assert ChatTemplate(QWEN3, TOKENS).describe_content() == "text"
    assert (
        ChatTemplate(GLM, TOKENS).describe_content() == "text (assistant system tool), parts (user)"
    )


def test_a_template_that_refuses_the_probes_gets_content_as_it_came() -> None:
    source = "{{ raise_exception('no') if true }}{{ messages[0].content[0].text }}"
    assert ChatTemplate(source).content_form("user", with_tools=False) == "either"


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
