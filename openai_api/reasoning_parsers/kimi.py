"""Reasoning of Kimi's models: the older ones write `◁think▷`, K2 writes `<think>`."""

from __future__ import annotations

from openai_api.parser_signs import Signs
from openai_api.reasoning_parsers.think_tags import ThinkTags
from openai_api.tool_parsers.kimi_k2 import SECTION

_OPEN = "◁think▷"
_CLOSE = "◁/think▷"


class KimiThinking(ThinkTags):
    """Reads reasoning between `◁think▷` and `◁/think▷`."""

    open_tag = _OPEN
    close_tag = forced_end = _CLOSE
    markers = (_OPEN, _CLOSE)
    signs = Signs(template=(_CLOSE, _OPEN), response={"open": _OPEN, "content": "text"})


class KimiK2Thinking(ThinkTags):
    """Reads `<think>` tags; the beginning of a section of calls also ends reasoning."""

    signs = Signs(template=("</think>", SECTION))
    call_opens = (SECTION,)
