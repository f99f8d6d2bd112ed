"""Parser of forced calls: a JSON array of objects with `name` and `parameters`."""

from __future__ import annotations

from openai_api.parser_signs import Signs
from openai_api.tool_parsers.json_calls import JsonCalls


class JsonArrayParser(JsonCalls):
    """Reads calls in the format that the grammar of forced calls enforces for all models."""

    signs = Signs()
    bare = "[{"
    has_array = True
