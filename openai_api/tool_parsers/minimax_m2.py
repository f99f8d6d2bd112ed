"""Parser of MiniMax M2's tool calls, which are in a section.

`<invoke name="f"><parameter name="key">value</parameter></invoke>`
"""

from __future__ import annotations

import re

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.tagged_calls import TaggedCalls
from openai_api.tool_parsers.tool_parser import CallForm

SECTION = "<minimax:tool_call>"
SECTION_END = "</minimax:tool_call>"
_INVOKE = '<invoke name="'


class MiniMaxM2Parser(TaggedCalls):
    """Reads MiniMax M2's tool calls: any number of them between `SECTION` and `SECTION_END`."""

    markers = (SECTION, SECTION_END)
    signs = Signs(template=("minimax:tool_call", _INVOKE, '<parameter name="'))
    call_form = CallForm(
        SECTION,
        lambda name: f'{_INVOKE}{name}">\n',
        "</invoke>\n",
        style="minimax_xml",
        opening=r"\n",
        closing=SECTION_END,
    )
    opens = (SECTION,)
    header = re.compile(rf'\s*(?:{_INVOKE})?(?P<name>[^\s<>"]+)"')
    name_end = ">"
    key_open = '<parameter name="'
    key_end = '">'
    value_end = "</parameter>"
    close = "</invoke>"
    tails = (SECTION_END,)
    separators = (_INVOKE,)
