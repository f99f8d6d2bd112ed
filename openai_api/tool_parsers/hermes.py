"""Parser of the tool calls of Hermes, Qwen 2.5 and Qwen 3.

`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
"""

from __future__ import annotations

import orjson

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls
from openai_api.tool_parsers.tool_parser import CallForm

OPEN_TAG = "<tool_call>"
CLOSE_TAG = "</tool_call>"


def _begin(name: str) -> str:
    return f'\n{{"name": {orjson.dumps(name).decode()}, "arguments": '


class HermesParser(JsonCalls):
    """Reads one object in each pair of tags; whitespace around a call is dropped."""

    markers = (OPEN_TAG, CLOSE_TAG)
    signs = Signs(
        template=(OPEN_TAG, '"name":', '"arguments":'),
        response={"open": OPEN_TAG, "content": "json"},
    )
    call_form = CallForm(OPEN_TAG, _begin, f"}}\n{CLOSE_TAG}", separator="\n")
    opens = (OPEN_TAG,)
    tails = (CLOSE_TAG,)
