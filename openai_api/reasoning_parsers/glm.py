"""Reasoning of GLM 4.5 and later, which may call a tool without closing the reasoning."""

from __future__ import annotations

from openai_api.parser_signs import Signs
from openai_api.reasoning_parsers.think_tags import ThinkTags
from openai_api.tool_parsers.glm45 import OPEN_TAG


class Glm45Thinking(ThinkTags):
    """Reads `<think>` tags; the beginning of a call also ends reasoning."""

    signs = Signs(template=("</think>", "<arg_key>", "</arg_value>"))
    call_opens = (OPEN_TAG,)
