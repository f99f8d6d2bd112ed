"""Parser of the tool calls of Qwen 3 Coder, 3.5 and 3.6.

`<function=name><parameter=key>value</parameter></function>`
"""

from __future__ import annotations

import re

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.tagged_calls import TaggedCalls
from openai_api.tool_parsers.tool_parser import CallForm

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"
_FUNCTION = "<function="


class Qwen3CoderParser(TaggedCalls):
    """Reads calls with or without the outer tags, which these models sometimes omit."""

    markers = (OPEN_TAG, CLOSE_TAG)
    signs = Signs(template=(_FUNCTION, "<parameter=", "</parameter>", "</function>"))
    call_form = CallForm(
        OPEN_TAG,
        lambda name: f"\n{_FUNCTION}{name}>\n",
        f"\n</function>\n{CLOSE_TAG}",
        separator="\n",
        style="qwen_xml",
        others=(CallForm(_FUNCTION, lambda name: f"{name}>\n", "\n</function>", style="qwen_xml"),),
    )
    opens = (OPEN_TAG, _FUNCTION)
    header = re.compile(rf"\s*(?:{_FUNCTION})?\s*(?P<name>[^\s<>=]+)\s*")
    name_end = ">"
    key_open = "<parameter="
    key_end = ">"
    value_end = "</parameter>"
    close = "</function>"
    tails = (CLOSE_TAG,)
