"""`{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`: Llama 3.1, 3.2, 3.3."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.departures import ANY_BLANK, BLANK, departing
from openai_api.tool_parsers.json_calls import JsonCalls
from openai_api.tool_parsers.tool_parser import CallForm

PYTHON_TAG = "<|python_tag|>"
# Keys of a call that may come first in it: an answer that begins so could still become one.
_FIRST_KEYS = ("arguments", "parameters", "id", "type")


def _begin(name: str) -> str:
    return f'{{"name": {orjson.dumps(name).decode()}, "parameters": '


def _no_call(names: Sequence[str]) -> str:
    """An output without a brace at its beginning, or whose object has another key or name first."""
    key = {'name"': _behind_name(names), **{f'{key}"': "" for key in _FIRST_KEYS}}
    inside = rf'[^"{BLANK}]|"({departing(key)})'
    return rf"[{BLANK}]*([^{{{ANY_BLANK}]|\{{[{BLANK}]*({inside}))"


def _behind_name(names: Sequence[str]) -> str:
    offered = {orjson.dumps(name).decode()[1:]: "" for name in names}
    return rf'[{BLANK}]*([^:{BLANK}]|:[{BLANK}]*([^"{BLANK}]|"({departing(offered)})))'


class Llama3Parser(JsonCalls):
    """Where an output begins with a brace it may be a call; later only behind the tag."""

    markers = (PYTHON_TAG,)
    signs = Signs(template=('{"name": "', '"parameters": '))
    # Without its first character: the one that tells what no call is may have been that.
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
