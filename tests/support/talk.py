"""Tests of the page at `/`: a server with scripted answers, and actions of a user of the page."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.browser import Page
from tests.support.fake_engine import IM_END, IM_START, byte_tokenizer
from tests.support.fake_server import FakeServer
from tests.support.served_app import served

READY = "document.body?.dataset.ready"
IDLE = "document.querySelector('#stop').hidden"
LAST = "[...document.querySelectorAll('.message')].at(-1)"

# The answers of the script by the latest message. Any other message is repeated.
ANSWERS = {
    "attack": "<script>window.hacked = 1</script>\n\n<img src=x onerror='window.hacked = 2'>\n\n"
    "![pixel](https://outside.example/p.png) [run](javascript:window.hacked=3) "
    "**<b>bold</b>** `<i>code</i>`\n\n```html\n<script>window.hacked = 4</script>\n```\n"
    "<svg onload=window.hacked=5>\n\n| <u>a</u> | b |\n|---|---|\n| <iframe src=/x> | 2 |\n",
    "think": "<think>\nFirst I think.\n</think>\n\nThen I answer.",
    "tool": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>',
    "sunny": "It is sunny in Bern.",
    "long": "word " * 400,
    "markdown": "# Title\n\nOne *two* **three** `four`.\n\n- a\n- b\n  1. c\n\n> quoted\n\n"
    "```python\nprint('<hi>')\n```\n\n| x | y |\n|---|---|\n| 1 | 2 |\n",
}


class Script:
    """The script of the model's answers.

    Attributes:
        prompts: all prompts so far.
    """

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        turn = prompt.rpartition(f"{IM_END}\n{IM_START}assistant\n")[0].rpartition("\n")[2]
        return ANSWERS.get(turn, f"You said: {turn} ({len(self.prompts)})")


# The script finds the latest message by its line, so the template must not write empty lines.
CHATML_WITH_TOOLS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '')"
    " }}{% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.function.name +"
    " '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@contextmanager
def scripted_server(folder: Path, step_s: float, **http: Any) -> Iterator[tuple[str, Script]]:
    """Serve the complete application over a fake engine, in a thread; yield URL and script."""
    script = Script()
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    url = ""

    async def serve() -> None:
        nonlocal url
        engine = {"reply": script, "step_s": step_s, "tokenizer": byte_tokenizer(CHATML_WITH_TOOLS)}
        server = FakeServer(folder, engine_options=engine, **http)
        async with served(server.app) as (port, _):
            url = f"http://127.0.0.1:{port}"
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(20)
        yield url, script
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def ask(page: Page, text: str) -> None:
    page.evaluate("document.querySelector('#prompt').focus()")
    page.type(text)
    page.press("Enter")


def settle(page: Page) -> str:
    """Wait for the end of the answer, and return its text."""
    page.wait(f"{IDLE} && {LAST}.classList.contains('assistant')")
    return page.evaluate(f"{LAST}.querySelector('.text').innerText").strip()


def turns(page: Page) -> str:
    """Return which version of the last answer is shown, and of how many."""
    return page.text(".message.assistant .turns").split("\n")[1]


def fill(page: Page, name: str, value: str) -> None:
    """Type a value into a field of the settings."""
    page.evaluate(
        f"(field => {{ field.closest('details:not(.side)')?.setAttribute('open', '');"
        f" field.focus(); field.select(); }})(document.querySelector('[name={name}]'))"
    )
    page.type(value)
