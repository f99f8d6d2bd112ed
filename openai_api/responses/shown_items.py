"""Converts the calls of OpenAI's own tools, and their results, to parts of chat messages.

Chat has no messages for these items. A call that the client executed becomes a function call. A
call that OpenAI's servers executed becomes a short text of the assistant. A file or an image that
the model cannot read becomes a short note.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai_api.call_arguments import arguments_text
from openai_api.content_parts import note

# For each type of call, the name of the function, and the item's fields that are its arguments.
_FUNCTIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "shell_call": ("shell", ("action",)),
    "apply_patch_call": ("apply_patch", ("operation",)),
    "computer_call": ("computer", ("action", "actions")),
    "program": ("program", ("code",)),
    "tool_search_call": ("tool_search", ("arguments",)),
}
CLIENT_CALLS = tuple(_FUNCTIONS)
CLIENT_OUTPUTS = (
    *("shell_call_output", "apply_patch_call_output", "computer_call_output"),
    *("program_output", "tool_search_output"),
)
# For each item type of OpenAI's servers, the fields that are shown.
_SHOWN: Mapping[str, tuple[str, ...]] = {
    "web_search_call": ("action",),
    "file_search_call": ("queries", "results"),
    "code_interpreter_call": ("code", "outputs"),
    "image_generation_call": ("revised_prompt",),
    "mcp_list_tools": ("server_label", "tools", "error"),
    "mcp_call": ("server_label", "name", "arguments", "output", "error"),
    "mcp_approval_request": ("server_label", "name", "arguments"),
    "mcp_approval_response": ("approve", "reason"),
}
HOSTED_ITEMS = tuple(_SHOWN)
# The fields of a result that are shown, in this order.
_RESULTS = ("output", "result", "tools", "stdout", "stderr", "text", "logs", "name", "outcome")
_OUTCOMES = ("type", "exit_code", "status")
_IMAGES = frozenset({"computer_screenshot", "input_image", "image"})
# The deepest nesting of a result that is shown; clients send three levels.
_MAX_DEPTH = 8


def function_of(item: Mapping[str, Any]) -> tuple[str, Any]:
    """Return name and arguments of the function call that an item of `CLIENT_CALLS` becomes."""
    name, fields = _FUNCTIONS[item["type"]]
    given = {field: item[field] for field in fields if item.get(field) is not None}
    only = next(iter(given.values())) if len(given) == 1 else given
    return name, only if isinstance(only, dict) else given


def hosted_text(item: Mapping[str, Any]) -> str:
    """Return the short text, never empty, that an item of `HOSTED_ITEMS` becomes.

    The item's fields may have any type.
    """
    kind = item["type"]
    given = {
        field: _plain(item[field]) for field in _SHOWN[kind] if item.get(field) not in (None, [])
    }
    return f"[{kind} {arguments_text(given)}]" if given else note(kind)


def output_text(item: Mapping[str, Any]) -> str:
    """Return the text that an item of `CLIENT_OUTPUTS` becomes.

    The item's fields may have any type.
    """
    return "\n".join(_lines({key: item.get(key) for key in _RESULTS})) or _status(item)


def _status(item: Mapping[str, Any]) -> str:
    status = item.get("status")
    return status if isinstance(status, str) else ""


def _lines(value: Any, depth: int = 0) -> list[str]:
    if isinstance(value, str):
        return [value] if value else []
    if depth == _MAX_DEPTH:
        return []
    if isinstance(value, list):
        return [line for each in value for line in _lines(each, depth + 1)]
    if not isinstance(value, dict):
        return []
    if value.get("type") in _IMAGES:
        return [note("image")]
    lines = [line for key in _RESULTS[:-1] for line in _lines(value.get(key), depth + 1)]
    outcome = value.get("outcome")
    if isinstance(outcome, dict):
        told = [f"{key}={outcome[key]}" for key in _OUTCOMES if outcome.get(key) is not None]
        lines.append(f"[{' '.join(told)}]")
    return lines


def _plain(value: Any, depth: int = 0) -> Any:
    """Return `value` without nulls, data URLs and tools' schemas, which would fill the prompt."""
    if depth == _MAX_DEPTH and isinstance(value, dict | list):
        return "..."
    if isinstance(value, dict):
        return {
            key: _plain(each, depth + 1)
            for key, each in value.items()
            if each is not None and key != "input_schema"
        }
    if isinstance(value, list):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, str) and value.startswith("data:"):
        return "data:..."
    return value
