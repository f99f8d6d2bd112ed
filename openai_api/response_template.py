"""Makes parsers from a checkpoint's `response_template`, for formats without a named parser.

The field `response_template` of `tokenizer_config.json` describes how a model writes its answers.
For each part of an answer it has the texts or patterns that open and close the part, the format of
the content, and where a call's name and arguments are. A description becomes a parser if it fits
the tables of `JsonCalls`, `TaggedCalls` or `ThinkTags`. Other descriptions are not used (for
example a pattern with more than texts around one name), and the chat template selects the parser.
Source: the format of `transformers.utils.chat_parsing`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from openai_api.parser_signs import Signs
from openai_api.reasoning_parsers.reasoning_parser import ReasoningParser
from openai_api.reasoning_parsers.think_tags import AlwaysThinking, ThinkTags
from openai_api.tool_parsers.call_object import ARGUMENT_KEYS, NAME_KEYS
from openai_api.tool_parsers.json_calls import JsonCalls
from openai_api.tool_parsers.tagged_calls import TaggedCalls
from openai_api.tool_parsers.tool_parser import ToolParser

_MAX_PATTERN = 512
# One part of a supported pattern. Alternatives are not supported, nor are groups in groups.
_PART = re.compile(
    r"""(?P<space>(?:\\s|\\n|\\t|\n|[ ])[*+?]\??|\\s|\\n|\n)
    |(?P<any>(?:\.|\\[wS]|\[[^\]]*\])[*+]\??)
    |\(\?P<(?P<group>\w+)>[^()]*\)
    |(?:\\(?P<escaped>[^\w\s])|(?P<plain>[^\\.*+?()\[\]{}^$|\n]))(?![*+?{])""",
    re.VERBOSE,
)
_NAME = r"(?P<name>[^\s<>\"'{}]+)"


@dataclass(frozen=True)
class _Pattern:
    """A pattern as a list of texts.

    Attributes:
        parts: texts, and `None` where any text may stand.
        groups: for each named group, the index in `parts` of the part after it; never 0.
    """

    parts: list[str | None] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)

    def texts(self, begin: int, end: int | None = None) -> list[str]:
        return [part for part in self.parts[begin:end] if part is not None]


def described_tools(fields: Iterable[Mapping[str, Any]]) -> type[ToolParser] | None:
    """Make the tool-call parser of the first field that is supported; `None` if none is."""
    for described in fields:
        found = _json_calls(described) or _tagged_calls(described)
        if found is not None:
            return found
    return None


def described_reasoning(fields: Iterable[Mapping[str, Any]]) -> type[ReasoningParser] | None:
    """Make the reasoning parser of the first field that is supported; `None` if none is."""
    for described in fields:
        opens, closes = _texts(described.get("open")), _texts(described.get("close"))
        if described.get("content", "text") != "text" or not closes or "open_pattern" in described:
            continue
        if not opens:
            return type("DescribedReasoning", (AlwaysThinking,), _tags(closes[0], closes[0]))
        return type("DescribedReasoning", (ThinkTags,), _tags(opens[0], closes[0]))
    return None


def _tags(open_tag: str, close_tag: str) -> dict[str, Any]:
    return {
        "open_tag": open_tag,
        "close_tag": close_tag,
        "forced_end": close_tag,
        "markers": (open_tag, close_tag),
        "signs": Signs(),
    }


def _json_calls(described: Mapping[str, Any]) -> type[ToolParser] | None:
    if described.get("content") != "json" or described.get("content_args"):
        return None
    name, arguments = _places(described)
    # In a list, the paths of name and arguments begin at each call; otherwise at the content.
    is_list = described.get("transform_each") is True
    root = "" if is_list else "content."
    opens: tuple[str, ...] = tuple(_texts(described.get("open")))
    table: dict[str, Any] = {"has_array": is_list}
    if name == "name" and arguments == "content":
        opening = _read(described.get("open_pattern"))
        if opening is None or list(opening.groups) != ["name"]:
            return None
        opens, table["header"] = _header(opening)
    elif name not in {root + key for key in NAME_KEYS} or arguments not in {
        root + key for key in ARGUMENT_KEYS
    }:
        return None
    closing = _texts(described.get("close")) or _pattern_texts(described.get("close_pattern"))
    if not opens or closing is None:
        return None
    table |= {"opens": opens, "tails": tuple(closing), "markers": (*opens, *closing)}
    return type("DescribedCalls", (JsonCalls,), {**table, "signs": Signs()})


def _tagged_calls(described: Mapping[str, Any]) -> type[ToolParser] | None:
    arguments = described.get("content_args")
    if described.get("content") != "xml-inline" or not isinstance(arguments, Mapping):
        return None
    opening, inside = _read(described.get("open_pattern")), _read(arguments.get("tag_pattern"))
    closing = _texts(described.get("close")) or _pattern_texts(described.get("close_pattern"))
    if opening is None or inside is None or not closing or _places(described)[0] != "name":
        return None
    at = opening.groups.get("name", 0)
    key, value = inside.groups.get("key", 0), inside.groups.get("value", 0)
    behind_name, behind_value = opening.texts(at), inside.texts(value)
    between = inside.texts(key, value)
    if not at or not 0 < key < value or len(behind_value) != 1 or len(between) not in (1, 2):
        return None
    opens, _ = _header(opening)
    before = r"\s*".join(map(re.escape, opening.texts(1, at)))
    keeps_name_end = not behind_name
    table = {
        "opens": opens,
        "header": re.compile(rf"\s*{before}\s*{_NAME}\s*"),
        # If no text follows the name, the next tag ends it: an argument's tag, or the call's end.
        "name_end": behind_name[0] if behind_name else "<",
        "keeps_name_end": keeps_name_end,
        "key_open": "".join(inside.texts(0, key)),
        "key_end": between[0],
        "value_open": between[1] if len(between) > 1 else "",
        "value_end": behind_value[0],
        "close": closing[0],
        "tails": tuple(closing[1:]),
        "markers": (*opens, *closing),
        "signs": Signs(),
    }
    return type("DescribedCalls", (TaggedCalls,), table)


def _header(opening: _Pattern) -> tuple[tuple[str, ...], re.Pattern[str]]:
    """Return the text with which an opening pattern begins, and a regex for the rest of it."""
    at = opening.groups["name"]
    parts = [r"[^{}]*?" if part is None else re.escape(part) for part in opening.parts]
    pattern = r"\s*".join(["", *parts[1:at], _NAME, *parts[at:]])
    assert opening.parts[0] is not None
    return (opening.parts[0],), re.compile(pattern)


def _places(described: Mapping[str, Any]) -> tuple[str, str]:
    """Return where a call's name and arguments are: in named groups, or in keys of the content."""
    transform = described.get("transform", "{content}")
    if isinstance(transform, Mapping):
        transform = transform.get("function", transform)
    if transform == "{content}":
        return "content.name", "content.arguments"
    if not isinstance(transform, Mapping):
        return "", ""
    name, arguments = transform.get("name"), transform.get("arguments")
    if not isinstance(name, str) or not isinstance(arguments, str):
        return "", ""
    return name.strip("{}"), arguments.strip("{}")


def _texts(value: object) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    return [each for each in listed if isinstance(each, str) and each.strip()]


def _pattern_texts(pattern: object) -> list[str] | None:
    """Return the texts of a pattern (an empty list without one); `None` if it has other parts."""
    if pattern is None:
        return []
    read = _read(pattern)
    if read is None or read.groups or None in read.parts:
        return None
    return read.texts(0)


def _read(pattern: object) -> _Pattern | None:
    """Parse a pattern; return `None` if it has more than texts, whitespace and groups."""
    if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN:
        return None
    read, place, joins = _Pattern(), 0, False
    while place < len(pattern):
        part = _PART.match(pattern, place)
        if part is None:
            return None
        place = part.end()
        text = part["escaped"] or part["plain"]
        if text is not None and joins:
            read.parts[-1] = f"{read.parts[-1]}{text}"
        elif text is not None:
            read.parts.append(text)
        elif part["group"] is not None:
            read.groups[part["group"]] = len(read.parts)
        elif part["any"] is not None:
            read.parts.append(None)
        joins = text is not None
    begins_with_text = bool(read.parts) and read.parts[0] is not None
    return read if begins_with_text and 0 not in read.groups.values() else None
