"""Reasoning of Kimi's models: special marks at first, later the usual tags."""

from __future__ import annotations

from openai_api.parser_signs import Signs
from openai_api.reasoning_parsers.think_tags import ThinkTags
from openai_api.tool_parsers.kimi_k2 import SECTION

_OPEN = "◁think▷"
_CLOSE = "◁/think▷"


class KimiThinking(ThinkTags):
    """`◁think▷` and `◁/think▷`."""

    open_tag = _OPEN
    close_tag = forced_end = _CLOSE
    markers = (_OPEN, _CLOSE)
    signs = Signs(template=(_CLOSE, _OPEN), response={"open": _OPEN, "content": "text"})


class KimiK2Thinking(ThinkTags):
    """The usual tags; a section of calls also ends reasoning."""

    signs = Signs(template=("</think>", SECTION))
    call_opens = (SECTION,)
