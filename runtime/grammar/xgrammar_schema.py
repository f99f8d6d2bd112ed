"""Converts JSON schemas for xgrammar, and refuses schemas that xgrammar would misread.

xgrammar ignores some keywords. So a schema is refused here, and goes to another library, unless
xgrammar is known to follow it exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NoReturn

from runtime.grammar.grammar_backend import GrammarError
from runtime.grammar.schema_rewrite import rewritten
from runtime.grammar.string_formats import FORMATS

# Longest string whose length may be limited. Longer ones take seconds to compile.
MAX_COUNTED_CHARS = 4096
# A format without a longest text may have a `maxLength` from here on, which is then ignored: an
# answer hardly reaches it. Clients send a limit of 2,083 with every URL.
_FAR = 2048
_MAX_INTEGER = 2**63 - 1
# Number of digits after the decimal point that the library writes.
_MAX_DECIMALS = 6

# A regular expression for one character of a string, as JSON writes it. The library applies
# patterns to the text between the quotes. Negated classes would be shorter, but would allow bytes
# that are not UTF-8 and, in counted repeats, control characters and quotes. They would also take
# seconds to compile.
_CHAR = r"(?:[ !#-\[\]-~" + "\u0080-\ud7fb\ue000-\U0010ffff" + r']|\\"|\\\\|\\[/bfnrt])'
# One character of a string that is written without escapes, as in some structural tags.
_BARE_CHAR = r"[\s\S]"
# Matches regular expressions that the library reads as JSON Schema does, and that match no
# characters that JSON escapes. `(a+|b){2,}` is excluded, because the library accepts too much for
# it.
_PLAIN = re.compile(
    r"""(?:
      \\[dw]
    | \\[^\w\s"\\]
    | \[(?!\^)(?:\\[dw]|\\[^\w\s"\\]|[^\[\]\\"\x00-\x1f])+\]
    | \((?:\?:)?(?!\?)
    | [)|]
    | (?:[*+?]|\{\d+(?:,\d+)?\}|(?<!\))\{\d+,\})(?![?+])
    | [^\\()\[\]|*+?{}^$."\x00-\x1f]
    )*""",
    re.VERBOSE,
)
_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]])*\]|.", re.DOTALL)
_OBJECT_COUNTS = ("minProperties", "maxProperties")


def as_xgrammar_schema(schema: Any, style: str = "json") -> Any:
    """Return a checked schema in a form that xgrammar follows exactly.

    Args:
        schema: a schema that `check_schema` has accepted.
        style: how the values of properties are written. In all styles but `json`, strings are
            written without quotes.

    Raises:
        GrammarError: the schema has no such form; the message names the keyword and its position.
    """
    plain = rewritten(schema)
    definitions = plain.pop("$defs", {}) if isinstance(plain, dict) else {}
    made = _node(plain, "#", _CHAR if style == "json" else _BARE_CHAR)
    if definitions:
        made["$defs"] = {name: _node(each, name) for name, each in definitions.items()}
    return made


def _fail(path: str, what: str) -> NoReturn:
    raise GrammarError(f"at {path[:200]}: {what}")


def _node(schema: Any, path: str, char: str = _CHAR) -> Any:
    """Translate a schema and its inner schemas.

    Args:
        schema: a rewritten schema.
        path: position of the schema, for error messages.
        char: a regular expression for one character of a string, or of a property's value at the
            root.
    """
    if schema is False:
        _fail(path, "a schema that allows no value")
    if schema is True or not schema:
        return {}
    for key in ("$ref", "enum", "anyOf", "allOf"):
        if key in schema:
            for other in schema:
                if other != key:
                    _fail(path, f"{other!r} beside {key!r}")
    if "$ref" in schema or "enum" in schema:
        return schema
    if "anyOf" in schema:
        branches = enumerate(schema["anyOf"])
        return {"anyOf": [_node(each, f"{path}/anyOf/{index}", char) for index, each in branches]}
    if "type" not in schema:
        _fail(path, f"{next(iter(schema))!r} without 'type'")
    made: dict[str, Any] = {"type": schema["type"]}
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    for each in types:
        if each in _OF_TYPE:
            made |= _OF_TYPE[each](schema, path, char)
    return made


def _integer(schema: dict[str, Any], path: str, _: str) -> dict[str, Any]:
    if "multipleOf" in schema:
        _fail(path, "'multipleOf'")
    bounds: dict[str, Any] = {key: schema[key] for key in ("minimum", "maximum") if key in schema}
    for key, value in bounds.items():
        if abs(value) > _MAX_INTEGER and value != -_MAX_INTEGER - 1:
            _fail(path, f"a {key!r} of more than 64 bits")
    return bounds


def _number(schema: dict[str, Any], path: str, _: str) -> dict[str, Any]:
    if "multipleOf" in schema:
        _fail(path, "'multipleOf'")
    made: dict[str, Any] = {}
    for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if key in schema:
            value = made[key] = schema[key]
            if value != round(value, _MAX_DECIMALS):
                _fail(path, f"a {key!r} with more than {_MAX_DECIMALS} decimals")
    return made


def _string(schema: dict[str, Any], path: str, char: str) -> dict[str, Any]:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    is_counted = least > 0 or most is not None
    if "pattern" in schema:
        if is_counted or "format" in schema:
            _fail(path, "'pattern' beside a length or a format")
        return {"pattern": _whole(schema["pattern"], path, char)}
    if "format" in schema:
        known = FORMATS[schema["format"]]
        if least > known.shortest or (most is not None and most < (known.longest or _FAR)):
            _fail(path, f"minLength and maxLength cannot narrow the format {schema['format']!r}")
        return {"format": schema["format"]}
    if not is_counted:
        return {}
    if max(least, most or 0) > MAX_COUNTED_CHARS:
        _fail(path, f"a string's length may be bounded by at most {MAX_COUNTED_CHARS}")
    if most is not None and most < least:
        _fail(path, "maxLength is below minLength")
    return {"pattern": f"^{char}{{{least},{'' if most is None else most}}}$"}


def _whole(pattern: str, path: str, char: str) -> str:
    """Return a pattern for the whole text that is equivalent to a search for `pattern` in it.

    Args:
        pattern: the value of the keyword `pattern`.
        path: position of the schema, for error messages.
        char: a regular expression for one character of a string.
    """
    is_start = pattern.startswith("^")
    body = pattern[is_start:]
    before = body[:-1]
    is_end = body.endswith("$") and (len(before) - len(before.rstrip("\\"))) % 2 == 0
    if is_end:
        body = before
    if not _PLAIN.fullmatch(body):
        _fail(path, "a 'pattern' that is more than plain characters")
    # The library reads `(ab+)?` in a pattern as `a?b*`.
    body = "".join("{0,1}" if part == "?" and last == ")" else part for last, part in _pairs(body))
    if _has_ways(body):
        if is_start or is_end:
            _fail(path, "a 'pattern' with '^' or '$' in one of its ways")
        body = f"(?:{body})"
    return f"^{'' if is_start else f'{char}*'}{body}{'' if is_end else f'{char}*'}$"


def _pairs(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield each part of a regular expression together with the previous part."""
    return pairwise(["", *_PARTS.findall(pattern)])


def _has_ways(pattern: str) -> bool:
    depth = 0
    for _, part in _pairs(pattern):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            return True
    return False


def _array(schema: dict[str, Any], path: str, _: str) -> dict[str, Any]:
    made: dict[str, Any] = {key: schema[key] for key in ("minItems", "maxItems") if key in schema}
    if "prefixItems" in schema:
        made["prefixItems"] = [
            _node(each, f"{path}/prefixItems/{index}")
            for index, each in enumerate(schema["prefixItems"])
        ]
    items = schema.get("items", True)
    # Without this keyword, the library would allow no further items.
    made["items"] = False if items is False else _node(items, f"{path}/items") or True
    return made


def _object(schema: dict[str, Any], path: str, char: str) -> dict[str, Any]:
    given = schema.get("properties", {})
    rest = schema.get("additionalProperties", True)
    counts = {key: schema[key] for key in _OBJECT_COUNTS if key in schema}
    named = [name for name in schema.get("required", ()) if name not in given]
    if "patternProperties" in schema:
        patterns = schema["patternProperties"]
        if given or named or counts or rest is not False or len(patterns) != 1:
            _fail(path, "'patternProperties' beside other properties")
        ((pattern, value),) = patterns.items()
        value = _node(value, f"{path}/patternProperties")
        return {
            "patternProperties": {_whole(pattern, path, _CHAR): value or True},
            "additionalProperties": False,
        }
    if named and rest is False:
        _fail(path, f"'required' names {named[0][:40]!r}, which is not allowed")
    made: dict[str, Any] = dict(counts)
    properties = {
        name: _node(each, f"{path}/properties/{name[:40]}", char if path == "#" else _CHAR)
        for name, each in given.items()
    }
    other = False if rest is False else _node(rest, f"{path}/additionalProperties")
    properties |= dict.fromkeys(named, other)
    if properties:
        made["properties"] = properties
    if "required" in schema:
        made["required"] = list(dict.fromkeys(schema["required"]))
    # Without this keyword, the library would allow no further properties.
    made["additionalProperties"] = True if other == {} else other
    return made


_OF_TYPE = {
    "integer": _integer,
    "number": _number,
    "string": _string,
    "array": _array,
    "object": _object,
}
