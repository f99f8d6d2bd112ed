"""A JSON array of `{"name", "parameters"}` objects: the form of forced calls."""

from __future__ import annotations

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls


class JsonArrayParser(JsonCalls):
    """A grammar enforces this form; no model writes it unprompted."""

    signs = Signs()
    bare = "[{"
    has_array = True
