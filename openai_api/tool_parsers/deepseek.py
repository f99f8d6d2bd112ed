"""Reads DeepSeek's calls: `type sep name` and a fenced block in V3, `name sep` in V3.1."""

# ruff: noqa: RUF001  # DeepSeek spells its tokens with fullwidth bars.

from __future__ import annotations

import re
from collections.abc import Callable

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls
from openai_api.tool_parsers.tool_parser import CallForm

SECTION = "<｜tool▁calls▁begin｜>"
SECTION_END = "<｜tool▁calls▁end｜>"
CALL = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```json"
_NAME = r"(?P<name>[^\s<`{}]+)"


def _section(begin: Callable[[str], str], end: str, separator: str) -> CallForm:
    """Describe calls in a section, and single calls if a model omits the section."""
    return CallForm(
        SECTION,
        lambda name: CALL + begin(name),
        end,
        separator=separator,
        closing=SECTION_END,
        others=(CallForm(CALL, begin, end),),
    )


class DeepSeekV3Parser(JsonCalls):
    """Reads calls of V3 and R1: the name is on a separate line, the arguments are in a fence."""

    markers = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)
    signs = Signs(template=(SECTION, CALL, SEPARATOR, _FENCE))
    call_form = _section(
        lambda name: f"function{SEPARATOR}{name}\n{_FENCE}\n", f"\n```{CALL_END}", "\n"
    )
    opens = (SECTION, CALL)
    header = re.compile(rf"(?:{CALL}\s*)?[a-z]*\s*{SEPARATOR}\s*{_NAME}\s*(?:```(?:json)?)?")
    tails = ("```", CALL_END, SECTION_END)


class DeepSeekV31Parser(JsonCalls):
    """Reads calls of V3.1: the name, then the arguments as they are."""

    markers = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)
    signs = Signs(template=(SECTION, CALL, SEPARATOR))
    call_form = _section(lambda name: f"{name}{SEPARATOR}", CALL_END, "")
    opens = (SECTION, CALL)
    header = re.compile(rf"(?:{CALL})?\s*{_NAME}\s*{SEPARATOR}")
    header_end = SEPARATOR
    tails = (CALL_END, SECTION_END)
