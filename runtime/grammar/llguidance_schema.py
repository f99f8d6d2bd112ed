"""JSON schemas as llguidance reads them."""

from __future__ import annotations

from collections.abc import Mapping
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
    definitions = schema.get("$defs", {})

    def change(copy: dict[str, Any]) -> None:
        _drop_unknown_format(copy)
        _names_as_properties(copy, definitions)

    return {**with_each(schema, change), "x-guidance": _OPTIONS}


def _names_as_properties(schema: dict[str, Any], definitions: Mapping[str, Any]) -> None:
    """Write `propertyNames`, which the library refuses, as the properties that it allows.

    What is neither a list of names nor a pattern stays, as do names beside given properties.
    """
    if {"properties", "patternProperties"} & schema.keys():
        return
    names = schema.get("propertyNames")
    if isinstance(names, dict):
        names = definitions.get(str(names.get("$ref", "")).removeprefix("#/$defs/"), names)
    if not isinstance(names, dict):
        return
    value = schema.get("additionalProperties", True)
    listed = names.get("enum", [names["const"]] if "const" in names else [])
    if listed and all(isinstance(name, str) for name in listed):
        schema["properties"] = dict.fromkeys(listed, value)
    elif "pattern" in names and not {"minLength", "maxLength"} & names.keys():
        schema["patternProperties"] = {names["pattern"]: value}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _drop_unknown_format(schema: dict[str, Any]) -> None:
    if schema.get("format") not in FORMATS:
        schema.pop("format", None)
