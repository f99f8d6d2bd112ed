"""The chat template, rendered as the server renders it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

from recipes.demo_model.conversation import Message, Tool

TEMPLATE_PATH = Path(__file__).resolve().parent / "chat_template.jinja"
NO_THOUGHT = "<think>\n\n</think>\n\n"
"""What the generation prompt contains when thinking is off."""


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    return environment.from_string(TEMPLATE_PATH.read_text(encoding="utf-8"))


def render(
    messages: list[Message],
    tools: list[Tool] | None = None,
    *,
    enable_thinking: bool | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text of a chat."""
    switches: dict[str, Any] = {}
    if enable_thinking is not None:
        switches["enable_thinking"] = enable_thinking
    return _template().render(
        messages=messages,
        tools=tools or None,
        add_generation_prompt=add_generation_prompt,
        **switches,
    )
