"""Converts blocks that a chat message cannot hold to text for the model.

These are documents, search results, and the inputs and outputs of Anthropic's server tools. Their
text is shown. A short note replaces other content and blocks of unknown types, so that no block
makes a request fail.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai_api.call_arguments import arguments_text
from openai_api.content_parts import note

_SHOWN = frozenset(
    {
        *("document", "search_result", "tool_reference", "container_upload", "compaction"),
        *("tool_addition", "tool_removal", "mcp_tool_listing", "browser_state", "fallback"),
    }
)
# The inputs and outputs of server tools: `web_search_tool_result` and similar.
_ENDINGS = ("_tool_use", "_tool_result")
_TEXTS = (
    *("title", "tool_name", "name", "source", "url", "page_age", "text", "stdout", "stderr"),
    *("error_code", "error_message"),
)
_INNER = ("content", "tool_references", "tools", "tool", "tabs", "lines")
# The deepest nesting of blocks that is shown; clients send three levels.
_MAX_DEPTH = 8


def shown_text(block: Mapping[str, Any]) -> str:
    """Return the text for a block, whose fields other than `type` are unchecked; never empty."""
    kind = block["type"]
    if kind not in _SHOWN and not kind.endswith(_ENDINGS):
        return note(kind)
    if kind.endswith("_tool_use"):
        return f"[{block.get('name')} {arguments_text(block.get('input'))}]"
    return "\n".join(_lines(block)) or note(kind)


def _lines(value: object, depth: int = 0) -> list[str]:
    """Return the texts of a block, or of a list of blocks."""
    if isinstance(value, str):
        return [value] if value else []
    if depth == _MAX_DEPTH:
        return []
    if isinstance(value, list):
        return [line for each in value for line in _lines(each, depth + 1)]
    if not isinstance(value, dict):
        return []
    match value.get("type"):
        case "image":
            return [note("image")]
        case "document":
            return _document(value, depth)
    own = _strings(value, _TEXTS)
    return own + [line for name in _INNER for line in _lines(value.get(name), depth + 1)]


def _document(document: dict[str, Any], depth: int) -> list[str]:
    source = document.get("source")
    described = source if isinstance(source, dict) else {}
    match described.get("type"):
        case "text":
            body = _strings(described, ("data",))
        case "content":
            body = _lines(described.get("content"), depth + 1)
        case _:
            body = [*_strings(described, ("url",)), note("document")]
    return _strings(document, ("title", "context")) + body


def _strings(block: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    return [text for name in names if isinstance(text := block.get(name), str) and text]
