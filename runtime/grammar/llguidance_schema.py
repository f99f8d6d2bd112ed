"""JSON schemas as llguidance reads them."""

from __future__ import annotations

from typing import Any

from runtime.grammar.blanks import MAX_BLANKS
from runtime.grammar.grammar_backend import GrammarError
from runtime.grammar.schema_map import with_each

# The library refuses a schema with any other; for JSON Schema they are remarks.
FORMATS = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "uri",
        "uuid",
    }
)
_OPTIONS = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MAX_BLANKS}}}",
    # Else it refuses what it cannot show to be exclusive.
    "coerce_one_of": True,
}


def as_llguidance_schema(schema: Any) -> dict[str, Any]:
    """A copy of a checked schema with the library's options, without formats unknown to it.

    Raises:
        GrammarError: neither an object nor a boolean.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise GrammarError("a schema must be an object or a boolean")
    return {**with_each(schema, _drop_unknown_format), "x-guidance": _OPTIONS}


def _drop_unknown_format(schema: dict[str, Any]) -> None:
    if schema.get("format") not in FORMATS:
        schema.pop("format", None)
