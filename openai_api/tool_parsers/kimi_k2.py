"""Parser of Kimi K2's tool calls: a section of calls, whose ids contain the function's name."""

from __future__ import annotations

import re

from openai_api.call_ids import NameAndIndex
from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls
from openai_api.tool_parsers.tool_parser import CallForm

SECTION = "<|tool_calls_section_begin|>"
SECTION_END = "<|tool_calls_section_end|>"
CALL = "<|tool_call_begin|>"
CALL_END = "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
_INDEX = rf"[0-9]{{1,4}}{re.escape(ARGUMENTS)}"


class KimiK2Parser(JsonCalls):
    """Reads ids of the form `functions.NAME:INDEX`; the index counts the conversation's calls."""

    markers = (SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS)
    signs = Signs(template=(SECTION, CALL, ARGUMENTS))
    call_form = CallForm(
        SECTION,
        lambda name: f"{CALL}functions.{name}:",
        CALL_END,
        between=_INDEX,
        closing=SECTION_END,
        others=(CallForm(CALL, lambda name: f"functions.{name}:", CALL_END, between=_INDEX),),
    )
    id_form = NameAndIndex()
    opens = (SECTION, CALL)
    header = re.compile(
        rf"(?:{re.escape(CALL)}\s*)?(?P<id>(?:functions\.)?(?P<name>[^\s:<>{{}}]+)(?::[0-9]+)?)"
        rf"\s*{re.escape(ARGUMENTS)}"
    )
    header_end = ARGUMENTS
    tails = (CALL_END, SECTION_END)
