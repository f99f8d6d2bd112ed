"""`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, and `[TOOL_CALLS]name[ARGS]{...}` since."""

from __future__ import annotations

import re

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls

OPEN_TAG = "[TOOL_CALLS]"


class MistralParser(JsonCalls):
    """Both forms; an id between name and arguments is kept."""

    markers = (OPEN_TAG, "[ARGS]")
    signs = Signs(template=(OPEN_TAG,), response={"open": OPEN_TAG, "content": "json"})
    opens = (OPEN_TAG,)
    header = re.compile(r"(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>[^\s\[\]{}]+))?(?:\[ARGS\])?")
    has_array = True
