"""Finds in which form a chat template reads a message's content: text, a list of parts, or either.

Many templates accept both forms. But some loop over parts and silently drop a plain text, some
print a list as Python writes it, and some differ by role. So each role is rendered with a test
message in both forms. (vLLM looks for loops in the template's syntax tree and decides once for all
roles.) The syntax tree is used here only to see whether the template can read parts at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from jinja2 import nodes

Message = dict[str, Any]
Content = str | list[dict[str, Any]]
# Renders messages and tools to a prompt; `None` if the template fails or refuses them.
Render = Callable[[list[Message], list[dict[str, Any]] | None], str | None]

_MARK = "zqcontentzq"
# Matches where a template printed a part as Python or JSON instead of its text.
_WRITTEN_OUT = re.compile(rf"""['"]text['"]\s*:\s*['"]{_MARK}""")
# A test call. Its id has nine characters, because Mistral's templates refuse others.
_CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "probe", "arguments": {"key": "value"}},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


class ContentForm(StrEnum):
    """The form of content that a template accepts for a role: a text, a list of parts, or both."""

    TEXT = "text"
    PARTS = "parts"
    EITHER = "either"


Forms = Mapping[str, ContentForm]


def in_form(content: Content, form: ContentForm) -> Content:
    """Convert `content` to `form`. A list stays a list if one of its parts is not a text."""
    if form is ContentForm.PARTS and isinstance(content, str):
        return [{"type": "text", "text": content}]
    if form is not ContentForm.TEXT or isinstance(content, str):
        return content
    return " ".join(part["text"] for part in content) if _all_texts(content) else content


def _all_texts(parts: list[dict[str, Any]]) -> bool:
    return all("text" in part for part in parts)


def can_read_parts(tree: nodes.Template) -> bool:
    """Whether a template uses the key `text`, as every template that reads parts does."""
    if any(node.attr == "text" for node in tree.find_all(nodes.Getattr)):
        return True
    # The key may also be a string constant, as in `selectattr("type", "equalto", "text")` or
    # `map(attribute="text")`.
    return any(node.value == "text" for node in tree.find_all(nodes.Const))


def find_forms(render: Render, *, with_tools: bool) -> dict[str, ContentForm]:
    """Find the form of each role's content by rendering test messages.

    Args:
        render: renders the template.
        with_tools: whether the conversations offer a tool.

    Returns:
        The form for each role whose content appeared in a rendered prompt.
    """
    tools = [_TOOL] if with_tools else None
    forms: dict[str, ContentForm] = {}
    # The user comes first, because the other roles' test conversations contain a user message.
    for role in ("user", "assistant", "system", "developer", "tool", "function"):
        for before, after in _around(role, forms):
            shown = [
                form
                for form in (ContentForm.TEXT, ContentForm.PARTS)
                if _is_shown(
                    render([*before, {**_NAMED.get(role, {}), **_said(role, form)}, *after], tools)
                )
            ]
            if shown:
                forms[role] = shown[0] if len(shown) == 1 else ContentForm.EITHER
                break
    return forms


_NAMED: Mapping[str, Message] = {
    "tool": {"tool_call_id": _CALL["id"], "name": "probe"},
    "function": {"name": "probe"},
}


def _said(role: str, form: ContentForm) -> Message:
    return {"role": role, "content": in_form(_MARK, form)}


def _around(role: str, forms: Forms) -> Iterator[tuple[list[Message], list[Message]]]:
    """Yield messages to put before and after one of `role`, the most widely accepted first."""

    def filler(of: str, text: str) -> Message:
        return {"role": of, "content": in_form(text, forms.get(of, ContentForm.EITHER))}

    user = filler("user", "Hi")
    if role == "user":
        yield [], []
    elif role == "assistant":
        yield [user], [user]
        yield [user], []
    elif role in ("system", "developer"):
        yield [], [user]
    else:
        yield [user, {**filler("assistant", ""), "tool_calls": [_CALL]}], []
        yield [user, filler("assistant", "Ho")], []


def _is_shown(prompt: str | None) -> bool:
    return prompt is not None and _MARK in prompt and _WRITTEN_OUT.search(prompt) is None
