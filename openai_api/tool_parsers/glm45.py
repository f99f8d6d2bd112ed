"""Parser of GLM's tool calls, from version 4.5 on.

`<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`
"""

from __future__ import annotations

import re

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.tagged_calls import TaggedCalls
from openai_api.tool_parsers.tool_parser import CallForm

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


class Glm45Parser(TaggedCalls):
    """Reads calls with line breaks between tags (GLM 4.5) or without (GLM 4.7)."""

    markers = (OPEN_TAG, CLOSE_TAG)
    signs = Signs(template=(OPEN_TAG, "<arg_key>", "<arg_value>", "</arg_value>"))
    call_form = CallForm(OPEN_TAG, lambda name: name, CLOSE_TAG, separator="\n", style="glm_xml")
    opens = (OPEN_TAG,)
    header = re.compile(r"\s*(?P<name>[^\s<>{}]+)\s*")
    name_end = "<"
    keeps_name_end = True
    key_open = "<arg_key>"
    key_end = "</arg_key>"
    value_open = "<arg_value>"
    value_end = "</arg_value>"
    close = CLOSE_TAG
