"""Parsers of DeepSeek's tool calls.

In V3 a call is `type SEP name` and arguments in a code fence; in V3.1 it is `name SEP arguments`.
"""

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
    """Describe calls in a section, and single calls, because models may omit the section."""
    return CallForm(
        SECTION,
        lambda name: CALL + begin(name),
        end,
        separator=separator,
        closing=SECTION_END,
        others=(CallForm(CALL, begin, end),),
    )


class DeepSeekV3Parser(JsonCalls):
    """Reads calls of V3 and R1: the name ends its line, the arguments are in a code fence."""

    markers = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)
    signs = Signs(template=(SECTION, CALL, SEPARATOR, _FENCE))
    call_form = _section(
        lambda name: f"function{SEPARATOR}{name}\n{_FENCE}\n", f"\n```{CALL_END}", "\n"
    )
    opens = (SECTION, CALL)
    header = re.compile(rf"(?:{CALL}\s*)?[a-z]*\s*{SEPARATOR}\s*{_NAME}\s*(?:```(?:json)?)?")
    tails = ("```", CALL_END, SECTION_END)


class DeepSeekV31Parser(JsonCalls):
    """Reads calls of V3.1: the name, the separator, and the arguments without a fence."""

    markers = (SECTION, SECTION_END, CALL, CALL_END, SEPARATOR)
    signs = Signs(template=(SECTION, CALL, SEPARATOR))
    call_form = _section(lambda name: f"{name}{SEPARATOR}", CALL_END, "")
    opens = (SECTION, CALL)
    header = re.compile(rf"(?:{CALL})?\s*{_NAME}\s*{SEPARATOR}")
    header_end = SEPARATOR
    tails = (CALL_END, SECTION_END)
