"""`{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`: Llama 3.1, 3.2, 3.3."""

from __future__ import annotations

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls

PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(JsonCalls):
    """Where an output begins with a brace it may be a call; later only behind the tag."""

    markers = (PYTHON_TAG,)
    signs = Signs(template=('{"name": "', '"parameters": '))
    opens = (PYTHON_TAG,)
    separators = (";",)
    bare = "{"
