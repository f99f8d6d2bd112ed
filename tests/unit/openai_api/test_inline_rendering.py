"""Which renders of chat templates run on the event loop, and which in a thread."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from openai_api.chat_template import ChatTemplate
from runtime.errors import InvalidRequest
from tests.support.fake_engine import CHATML

TEMPLATE = ChatTemplate(CHATML)
SMALL = [{"role": "user", "content": "What is a mill?"}]
LOOPS = "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% endfor %}"
LOOPS += "{% endfor %}{% endfor %}done"


def first_step(rendering: Coroutine[Any, Any, str]) -> str | None:
    """The text, where it is there without a turn of the loop."""
    try:
        rendering.send(None)
    except StopIteration as done:
        return str(done.value)
    rendering.close()
    return None


async def test_a_small_conversation_is_rendered_at_once() -> None:
    assert first_step(TEMPLATE.render_async(SMALL)) == TEMPLATE.render(SMALL)
    tools = [{"type": "function", "function": {"name": "grind", "parameters": {}}}]
    assert first_step(TEMPLATE.render_async(SMALL, tools=tools)) is not None


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "x" * 40_000}],
        SMALL * 300,
        [{"role": "user", "content": [{"type": "text", "text": ""}] * 300}],
    ],
    ids=["text", "messages", "parts"],
)
async def test_a_large_one_is_not(messages: list[dict[str, Any]]) -> None:
    template = ChatTemplate("{% for message in messages %}{{ message.role }}{% endfor %}")
    assert first_step(template.render_async(messages)) is None
    assert await template.render_async(messages) == "user" * len(messages)


async def test_nor_one_of_a_template_that_may_be_costly() -> None:
    costly = ChatTemplate("{{ messages | slice(2) | list | length }}")
    assert first_step(costly.render_async(SMALL)) is None
    assert await costly.render_async(SMALL) == "2"


async def test_what_is_slow_all_the_same_goes_on_in_a_thread() -> None:
    template = ChatTemplate(LOOPS)
    assert template.choose(with_tools=False).doubt is None
    assert first_step(template.render_async(SMALL * 80)) is None
    assert await template.render_async(SMALL * 80) == "done"


async def test_a_refusal_is_the_same() -> None:
    template = ChatTemplate("{{ raise_exception('no mills') }}")
    with pytest.raises(InvalidRequest, match="no mills"):
        await template.render_async(SMALL)
