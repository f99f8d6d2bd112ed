"""Inputs of the chat template besides roles and texts: parts, switches, documents."""

from __future__ import annotations

from typing import Any

import pytest


async def test_a_template_that_loops_over_parts_gets_them(make_front: Any) -> None:
    template = (
        "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
    )
    front = make_front(lambda prompt: prompt, template=template)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": "q"}, {"role": "user", "content": parts}]
    answer = await front.post("/v1/chat/completions", {"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == "q;a;b;"


async def test_thinking_switches_reach_the_template(make_front: Any) -> None:
    template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ reasoning_effort }}"
    front = make_front(lambda prompt: prompt, template=template)

    async def prompt(**fields: Any) -> str:
        text: str = (await front.chat("q", **fields)).json()["choices"][0]["message"]["content"]
        return text

    assert await prompt() == "q||"
    assert await prompt(reasoning_effort="none") == "q|False|none"
    assert await prompt(reasoning_effort="high") == "q|True|high"
    assert await prompt(reasoning={"enabled": False}) == "q|False|"
    assert await prompt(chat_template_kwargs={"enable_thinking": True}) == "q|True|"
    assert await prompt(enable_thinking=False) == "q|False|"
    assert await prompt(enable_thinking=False, reasoning_effort="high") == "q|False|high"
    assert await prompt(thinking={"type": "disabled"}) == "q|False|"
    assert await prompt(thinking={"type": "enabled"}, enable_thinking=None) == "q|True|"
    assert await prompt(thinking={"type": "auto"}) == "q||"
    assert await prompt(thinking=False) == "q|False|"
    kwargs = {"enable_thinking": True}
    assert await prompt(thinking=False, chat_template_kwargs=kwargs) == "q|True|"
    assert (await front.chat("q", thinking={"type": "no"})).status_code == 400


DOCUMENTS = [{"title": "Sky", "text": "It is blue."}, {"title": "Sea", "text": "It is wet."}]


@pytest.mark.parametrize(
    "fields", [{"documents": DOCUMENTS}, {"chat_template_kwargs": {"documents": DOCUMENTS}}]
)
async def test_documents_reach_the_template(make_front: Any, fields: dict[str, Any]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        "{% for d in documents or [] %}[{{ loop.index }}] {{ d['title'] }}: {{ d.text }}\n"
        "{% endfor %}{{ messages[0].content }}"
    )
    front = make_front(lambda prompt: prompt, template=template)
    answer = await front.chat("q", **fields)
    messages = [{"role": "user", "content": "q"}]
    expected, _ = render_jinja_template([messages], documents=DOCUMENTS, chat_template=template)
    assert answer.json()["choices"][0]["message"]["content"] == expected[0]
    body = {"input": "q", **fields}
    answer = await front.post("/v1/responses", body)
    assert answer.json()["output"][0]["content"][0]["text"] == expected[0]


@pytest.mark.parametrize("documents", ["text", [1], [["a"]], {"title": "t"}])
@pytest.mark.parametrize("nested", [False, True])
async def test_documents_are_objects(make_front: Any, documents: Any, nested: bool) -> None:
    fields = {"documents": documents}
    answer = await make_front().chat(**({"chat_template_kwargs": fields} if nested else fields))
    assert answer.status_code == 400
    assert "documents" in answer.text
