"""Parser of the tool calls of Llama 3.1, 3.2 and 3.3.

`{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.departures import ANY_BLANK, BLANK, departing
from openai_api.tool_parsers.json_calls import JsonCalls
from openai_api.tool_parsers.tool_parser import CallForm

PYTHON_TAG = "<|python_tag|>"
# Keys besides the name that may come first in a call, so such an object may become a call.
_FIRST_KEYS = ("arguments", "parameters", "id", "type")


def _begin(name: str) -> str:
    return f'{{"name": {orjson.dumps(name).decode()}, "parameters": '


def _no_call(names: Sequence[str]) -> str:
    """Return a regex for outputs that do not begin with a call.

    They begin without a brace, or with an object whose first key or name is not that of a call.
    """
    key = {'name"': _behind_name(names), **{f'{key}"': "" for key in _FIRST_KEYS}}
    inside = rf'[^"{BLANK}]|"({departing(key)})'
    return rf"[{BLANK}]*([^{{{ANY_BLANK}]|\{{[{BLANK}]*({inside}))"


def _behind_name(names: Sequence[str]) -> str:
    offered = {orjson.dumps(name).decode()[1:]: "" for name in names}
    return rf'[{BLANK}]*([^:{BLANK}]|:[{BLANK}]*([^"{BLANK}]|"({departing(offered)})))'


class Llama3Parser(JsonCalls):
    """Reads calls that begin with a brace at the start of the output, and later with the tag."""

    markers = (PYTHON_TAG,)
    signs = Signs(template=('{"name": "', '"parameters": '))
    # The trigger has no `<` at its start, because `no_call` may have matched that character.
    call_form = CallForm(
        PYTHON_TAG[1:],
        _begin,
        "}",
        separator="; ",
        closing="",
        stands_alone=False,
        no_call=_no_call,
    )
    opens = (PYTHON_TAG,)
    separators = (";",)
    bare = "{"
