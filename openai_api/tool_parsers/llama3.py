"""`{"name": ..., "parameters": {...}}`, perhaps after `<|python_tag|>`: Llama 3.1, 3.2, 3.3."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.departures import ANY_BLANK, BLANK, departing
from openai_api.tool_parsers.json_calls import JsonCalls
from openai_api.tool_parsers.tool_parser import CallForm

PYTHON_TAG = "<|python_tag|>"
# Other keys that may come first in a call: an answer that begins with one could become a call.
_FIRST_KEYS = ("arguments", "parameters", "id", "type")


def _begin(name: str) -> str:
    return f'{{"name": {orjson.dumps(name).decode()}, "parameters": '


def _no_call(names: Sequence[str]) -> str:
    """Describe outputs that begin without a brace, or with an object of another key or name."""
    key = {'name"': _behind_name(names), **{f'{key}"': "" for key in _FIRST_KEYS}}
    inside = rf'[^"{BLANK}]|"({departing(key)})'
    return rf"[{BLANK}]*([^{{{ANY_BLANK}]|\{{[{BLANK}]*({inside}))"


def _behind_name(names: Sequence[str]) -> str:
    offered = {orjson.dumps(name).decode()[1:]: "" for name in names}
    return rf'[{BLANK}]*([^:{BLANK}]|:[{BLANK}]*([^"{BLANK}]|"({departing(offered)})))'


class Llama3Parser(JsonCalls):
    """A brace may begin a call at the start of the output; later only the tag does."""

    markers = (PYTHON_TAG,)
    signs = Signs(template=('{"name": "', '"parameters": '))
    # The trigger lacks the tag's first character, which `no_call` may already have matched.
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
