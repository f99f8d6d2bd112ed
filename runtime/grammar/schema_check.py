"""Looks at a JSON schema before any library does: size, depth, reference loops, keywords.

A keyword that the compiler would silently ignore is refused: an answer that breaks its schema is
worse than an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import orjson

from runtime.errors import InvalidRequest
from runtime.grammar.regex_check import check_regex, names_unquotable

MAX_JSON_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 20_000
MAX_PROPERTIES = 2_000
MAX_ENUM_VALUES = 5_000
MAX_COUNT = 1_000_000

_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_IGNORED = (
    "not",
    "uniqueItems",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
# Keywords that stand beside `$ref` without narrowing it, as those that begin with `x-` do.
_ANNOTATIONS = frozenset(
    {
        "$ref",
        "$schema",
        "$id",
        "$anchor",
        "$comment",
        "$defs",
        "definitions",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "nullable",
        # Of OpenAPI: which of several schemas it is, by a property that each of them fixes itself.
        "discriminator",
        "example",
        "externalDocs",
        "contentEncoding",
        "contentMediaType",
    }
)
_NEEDS_TYPE = {
    "minimum": {"number", "integer"},
    "maximum": {"number", "integer"},
    "exclusiveMinimum": {"number", "integer"},
    "exclusiveMaximum": {"number", "integer"},
    "multipleOf": {"number", "integer"},
    "minLength": {"string"},
    "maxLength": {"string"},
    "pattern": {"string"},
    "minItems": {"array"},
    "maxItems": {"array"},
}
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def _is_annotation(keyword: str) -> bool:
    return keyword in _ANNOTATIONS or keyword.startswith("x-")


def parse_json(text: str, name: str) -> Any:
    """Read JSON of bounded size.

    Raises:
        InvalidRequest: too long, too deep, or no JSON.
    """
    encoded = text.encode("utf-8", "surrogatepass")
    if len(encoded) > MAX_JSON_BYTES:
        raise InvalidRequest(
            f"{name} may have at most {MAX_JSON_BYTES} bytes, got {len(encoded)}.", param=name
        )
    try:
        return orjson.loads(encoded)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}.", param=name) from None


class _WellFormed:
    """A walk over a schema that looks at the forms of keywords, whatever they mean."""

    def __init__(self, root: Any, name: str, max_nodes: int = MAX_SCHEMA_NODES) -> None:
        self._root = root
        self._name = name
        self._max_nodes = max_nodes
        self.num_nodes = 0

    def run(self) -> None:
        stack: list[tuple[Any, str, int]] = [(self._root, "#", 0)]
        while stack:
            schema, path, depth = stack.pop()
            self.num_nodes += 1
            if depth > MAX_SCHEMA_DEPTH:
                self._fail(path[:100], f"schemas may nest at most {MAX_SCHEMA_DEPTH} deep")
            if self.num_nodes > self._max_nodes:
                self._fail(path, f"schemas may have at most {MAX_SCHEMA_NODES} parts")
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict):
                self._fail(path, "a schema must be an object or a boolean")
            self._check_node(schema, path)
            stack += [(each, where, depth + 1) for each, where in self._children(schema, path)]

    def _fail(self, path: str, what: str) -> NoReturn:
        raise InvalidRequest(f"{self._name} at {path[:200]}: {what}.", param=self._name)

    def _children(self, schema: dict[str, Any], path: str) -> Iterator[tuple[Any, str]]:
        for key in MAPS:
            for name, each in (schema.get(key) or {}).items():
                yield each, f"{path}/{key}/{name[:40]}"
        for key in LISTS:
            for index, each in enumerate(schema.get(key) or []):
                yield each, f"{path}/{key}/{index}"
        for key in SINGLE:
            if key in schema:
                yield schema[key], f"{path}/{key}"

    def _check_node(self, schema: dict[str, Any], path: str) -> None:
        for key in MAPS:
            if not isinstance(schema.get(key, {}), dict):
                self._fail(path, f"{key!r} must be an object")
        for key in LISTS:
            if key in schema and (not isinstance(schema[key], list) or not schema[key]):
                self._fail(path, f"{key!r} must be a list with at least one schema")
        for key in _COUNTS:
            value = schema.get(key, 0)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                self._fail(path, f"{key!r} must be an integer of at least 0")
        self._types(schema, path)
        if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
            self._fail(path, "'enum' must be a list with at least one value")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self._fail(path, "'required' must be a list of strings")
        if not isinstance(schema.get("pattern", ""), str):
            self._fail(path, "'pattern' must be a string")

    def _types(self, schema: dict[str, Any], path: str) -> set[str]:
        value = schema.get("type", [])
        types = value if isinstance(value, list) else [value]
        for each in types:
            if not isinstance(each, str) or each not in _TYPES:
                self._fail(path, f"'type' must be one of {', '.join(sorted(_TYPES))}")
        return set(types)


class _Check(_WellFormed):
    """The same walk, which also refuses what would not be followed to the letter."""

    def __init__(self, root: Any, name: str) -> None:
        super().__init__(root, name)
        self._num_properties = 0
        self._num_enum_values = 0

    def run(self) -> None:
        super().run()
        self._check_loops()

    def _check_node(self, schema: dict[str, Any], path: str) -> None:
        super()._check_node(schema, path)
        self._num_properties += len(schema.get("properties", ()))
        if self._num_properties > MAX_PROPERTIES:
            self._fail(path, f"a schema may have at most {MAX_PROPERTIES} properties")
        for key in _COUNTS:
            if schema.get(key, 0) > MAX_COUNT:
                self._fail(path, f"{key!r} must be in [0, {MAX_COUNT}]")
        types = self._types(schema, path)
        for key in _IGNORED:
            if schema.get(key, False) is not False:
                self._fail(path, f"the keyword {key!r} is not supported")
        if len(schema.get("allOf", ())) > 1:
            self._fail(path, "'allOf' with more than one schema is not supported")
        for key in ("$ref", "anyOf", "oneOf", "allOf"):
            beside = [k for k in schema if k not in (key, "type") and not _is_annotation(k)]
            if key in schema and (beside or (key == "$ref" and "type" in schema)):
                other = beside[0] if beside else "type"
                self._fail(path, f"{other!r} beside {key!r} is not supported")
        for key, wanted in _NEEDS_TYPE.items():
            if key in schema and not types & wanted:
                kinds = " or ".join(sorted(wanted))
                self._fail(path, f'{key!r} needs "type": {kinds}')
        self._check_patterns(schema, path)
        self._check_values(schema, types, path)
        self._check_required(schema, path)

    def _check_patterns(self, schema: dict[str, Any], path: str) -> None:
        if "pattern" in schema:
            if "minLength" in schema or "maxLength" in schema or "format" in schema:
                self._fail(path, "'pattern' beside a length or a format is not supported")
            self._check_pattern(schema["pattern"], path)
        for pattern in schema.get("patternProperties", ()):
            self._check_pattern(pattern, path)
        names = schema.get("propertyNames")
        if isinstance(names, dict) and "pattern" in names:
            self._check_pattern(names["pattern"], path)

    def _check_pattern(self, pattern: Any, path: str) -> None:
        if not isinstance(pattern, str):
            self._fail(path, "'pattern' must be a string")
        if names_unquotable(pattern):
            self._fail(path, "'pattern' must not ask for quotes, backslashes or control characters")
        try:
            check_regex(pattern, "pattern")
        except InvalidRequest as error:
            self._fail(path, error.message.rstrip("."))

    def _check_values(self, schema: dict[str, Any], types: set[str], path: str) -> None:
        if "enum" not in schema:
            return
        values = schema["enum"]
        self._num_enum_values += len(values)
        if self._num_enum_values > MAX_ENUM_VALUES:
            self._fail(path, f"a schema may list at most {MAX_ENUM_VALUES} values")
        if types and not all(_kinds(value) & types for value in values):
            self._fail(path, "'enum' holds a value that 'type' does not allow")

    def _check_required(self, schema: dict[str, Any], path: str) -> None:
        known = schema.get("properties", {})
        for name in schema.get("required", []):
            if name not in known:
                self._fail(path, f"'required' names {name[:40]!r}, which is not in 'properties'")

    # A schema that stands for itself, with nothing in between, allows no text at all.
    def _check_loops(self) -> None:
        done: set[int] = set()
        for start in self._references():
            trail: list[int] = []
            self._follow(start, trail, done)

    def _references(self) -> list[dict[str, Any]]:
        found, stack = [], [self._root]
        while stack:
            node = stack.pop()
            if isinstance(node, dict):
                if "$ref" in node:
                    found.append(node)
                stack += [each for each, _ in self._children(node, "")]
        return found

    def _follow(self, node: Any, trail: list[int], done: set[int]) -> None:
        if not isinstance(node, dict) or id(node) in done:
            return
        if id(node) in trail or len(trail) > MAX_SCHEMA_DEPTH:
            self._fail("#", f"the $ref {str(node.get('$ref', ''))[:80]!r} leads back to itself")
        trail.append(id(node))
        if "$ref" in node:
            self._follow(self._target(node["$ref"]), trail, done)
        for key in ("anyOf", "oneOf", "allOf"):
            for each in node.get(key, ()):
                self._follow(each, trail, done)
        trail.pop()
        done.add(id(node))

    def _target(self, reference: Any) -> Any:
        if not isinstance(reference, str) or not reference.startswith("#"):
            self._fail("#", f"the $ref {str(reference)[:80]!r} must begin with '#'")
        node = self._root
        for part in filter(None, reference[1:].split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            elif isinstance(node, dict) and key in node:
                node = node[key]
            else:
                self._fail("#", f"the $ref {reference[:80]!r} points nowhere")
        return node


def _kinds(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", "integer"} if value.is_integer() else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array" if isinstance(value, list) else "object"}


def check_well_formed(schemas: Iterable[tuple[Any, str]]) -> None:
    """Refuse what is no JSON schema, though nothing is held to it.

    Args:
        schemas: each with the name that errors call it; their sizes count together.

    Raises:
        InvalidRequest: with the place in the schema.
    """
    left = MAX_SCHEMA_NODES
    for schema, name in schemas:
        check = _WellFormed(schema, name, left)
        check.run()
        left -= check.num_nodes


def check_schema(schema: Any, name: str = "json_schema") -> None:
    """Refuse a schema that is invalid, too large, or not followed to the letter.

    Raises:
        InvalidRequest: with the place in the schema.
    """
    _Check(schema, name).run()
