"""Converts arguments that a model writes as plain text to JSON of the types in their schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from openai_api.json_scan import JsonValue

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_WHOLE = re.compile(r"(-?(?:0|[1-9][0-9]*))\.0+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# The type of a string for which the schema lists the allowed values.
WORD = "word"
_BOOLEANS = {"true": "true", "false": "false", "True": "true", "False": "false"}
_NULLS = frozenset({"null", "None"})
# The most schemas that are visited for one argument, through references and choices.
_MAX_STEPS = 16


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of the value that `text` spells; a JSON string if it has none of `types`.

    Args:
        text: the value as the model wrote it.
        types: names of the allowed types, from `types_of`; empty if any type is allowed.
    """
    bare = text.strip()
    if types & {"integer", "number"} and _INTEGER.fullmatch(bare):
        return bare
    if "number" in types and _NUMBER.fullmatch(bare):
        return bare
    if "integer" in types and (whole := _WHOLE.fullmatch(bare)):
        return whole[1]
    if "boolean" in types and bare in _BOOLEANS:
        return _BOOLEANS[bare]
    if "null" in types and bare in _NULLS:
        return "null"
    kind = {"{": "object", "[": "array"}.get(bare[:1])
    if kind is not None and (not types or kind in types) and _is_json(bare):
        return bare
    is_word = WORD in types and "string" not in types
    return orjson.dumps(bare if is_word else text).decode()


def types_of(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the types that a function's schema allows for one argument; empty for any type.

    A string for which the schema lists the allowed values has the type `WORD`, because whitespace
    around it is not part of it.
    """
    properties = schema.get("properties")
    declared = properties.get(name) if isinstance(properties, Mapping) else None
    found: set[str] = set()
    waiting = [declared]
    for _ in range(_MAX_STEPS):
        if not waiting:
            return frozenset(found)
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        kind = one.get("type")
        named = {kind} if isinstance(kind, str) else _strings(kind)
        values = _values(one)
        if kind is None:
            named = {_TYPE_NAMES[type(each)] for each in values if type(each) in _TYPE_NAMES}
        if "string" in named and values and all(_is_bare(each) for each in values):
            named = named - {"string"} | {WORD}
        found |= named
        if one.get("nullable"):
            found.add("null")
        for key in ("anyOf", "oneOf", "allOf"):
            choices = one.get(key)
            waiting += choices if isinstance(choices, list) else []
        waiting.append(_referred(schema, one.get("$ref")))
    return frozenset(found)


_TYPE_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def _values(schema: Mapping[str, Any]) -> list[Any]:
    listed = schema.get("enum")
    values = list(listed) if isinstance(listed, list) else []
    return values + ([schema["const"]] if "const" in schema else [])


def _is_bare(value: object) -> bool:
    return not isinstance(value, str) or value == value.strip()


def _strings(value: object) -> set[str]:
    return {each for each in value if isinstance(each, str)} if isinstance(value, list) else set()


def _referred(root: Mapping[str, Any], reference: object) -> object:
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: object = root
    for part in reference[2:].split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _is_json(text: str) -> bool:
    value = JsonValue()
    return value.feed(text) == len(text) and value.is_done
