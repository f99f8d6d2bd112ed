"""Parser of Mistral's tool calls: an array of objects; in later models, a name and arguments.

`[TOOL_CALLS] [{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`
"""

from __future__ import annotations

import re

import orjson

from openai_api.call_ids import NineAlphanumerics
from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls
from openai_api.tool_parsers.tool_parser import CallForm

OPEN_TAG = "[TOOL_CALLS]"


class MistralParser(JsonCalls):
    """Reads both formats; an id between name and arguments becomes the call's id."""

    markers = (OPEN_TAG, "[ARGS]")
    signs = Signs(template=(OPEN_TAG,), response={"open": OPEN_TAG, "content": "json"})
    call_form = CallForm(
        OPEN_TAG,
        lambda name: name,
        "",
        between=r"(\[CALL_ID\][a-zA-Z0-9]{9})?\[ARGS\]",
        others=(
            CallForm(
                OPEN_TAG,
                lambda name: f'{{"name": {orjson.dumps(name).decode()}, "arguments": ',
                "}",
                separator=", ",
                opening=r" ?\[",
                closing="]",
            ),
        ),
    )
    id_form = NineAlphanumerics()
    opens = (OPEN_TAG,)
    header = re.compile(r"(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>[^\s\[\]{}]+))?(?:\[ARGS\])?")
    has_array = True
