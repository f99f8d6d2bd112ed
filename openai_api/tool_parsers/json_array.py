"""A JSON array of `{"name", "parameters"}` objects: what a forced call is written as."""

from __future__ import annotations

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls


class JsonArrayParser(JsonCalls):
    """A grammar makes the model write so; no model does by itself."""

    signs = Signs()
    bare = "[{"
    has_array = True
