"""Checks a JSON schema before a library compiles it: size, depth, reference loops, keywords.

A keyword that the libraries would ignore is refused, because an answer that violates its schema is
worse than an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NoReturn
from urllib.parse import unquote

import orjson

from runtime.errors import InvalidRequest
from runtime.grammar.regex_check import check_regex

MAX_JSON_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_SCHEMA_NODES = 20_000
MAX_PROPERTIES = 2_000
MAX_ENUM_VALUES = 5_000
MAX_COUNT = 1_000_000

_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
# Keywords that do not restrict values.
_ANNOTATIONS = frozenset({"$comment", "title", "description", "default", "examples", "deprecated"})
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
# Keywords with inner schemas that are checked only if the schema is used as a grammar.
_ALSO_SINGLE = ("propertyNames", "not", "then", "else")
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def parse_json(text: str, name: str) -> Any:
    """Parse JSON whose size is limited.

    Raises:
        InvalidRequest: the text is too long, too deep, or not JSON. The message begins with `name`.
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
    """Checks that the keywords of a schema have the right form; ignores what they mean."""

    def __init__(self, root: Any, name: str, max_nodes: int = MAX_SCHEMA_NODES) -> None:
        self._root = root
        self._name = name
        self._max_nodes = max_nodes
        self.num_nodes = 0

    def run(self) -> None:
        self._walk(self._root, "#")

    def _walk(self, start: Any, name: str) -> None:
        stack: list[tuple[Any, str, int]] = [(start, name, 0)]
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
        for key in _MAPS:
            for name, each in (schema.get(key) or {}).items():
                yield each, f"{path}/{key}/{name[:40]}"
        for key in _LISTS:
            for index, each in enumerate(schema.get(key) or []):
                yield each, f"{path}/{key}/{index}"
        for key in _SINGLE:
            if key in schema:
                yield schema[key], f"{path}/{key}"

    def _check_node(self, schema: dict[str, Any], path: str) -> None:
        for key in _MAPS:
            if not isinstance(schema.get(key, {}), dict):
                self._fail(path, f"{key!r} must be an object")
        for key in _LISTS:
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
    """Also checks that the libraries follow a schema exactly, and that references exist."""

    def __init__(self, root: Any, name: str) -> None:
        super().__init__(root, name)
        self._num_properties = 0
        self._num_enum_values = 0
        self._seen: set[int] = set()
        self._references: list[dict[str, Any]] = []

    def run(self) -> None:
        super().run()
        # A reference may lead to a schema that is not inside any known keyword.
        for node in self._references:
            target = self._target(node["$ref"])
            if id(target) not in self._seen:
                self._walk(target, node["$ref"])
        self._check_loops()

    def _children(self, schema: dict[str, Any], path: str) -> Iterator[tuple[Any, str]]:
        yield from super()._children(schema, path)
        for key in _ALSO_SINGLE:
            if key in schema:
                yield schema[key], f"{path}/{key}"

    def _check_node(self, schema: dict[str, Any], path: str) -> None:
        super()._check_node(schema, path)
        self._seen.add(id(schema))
        if "$ref" in schema:
            self._references.append(schema)
        self._num_properties += len(schema.get("properties", ()))
        if self._num_properties > MAX_PROPERTIES:
            self._fail(path, f"a schema may have at most {MAX_PROPERTIES} properties")
        for key in _COUNTS:
            if schema.get(key, 0) > MAX_COUNT:
                self._fail(path, f"{key!r} must be in [0, {MAX_COUNT}]")
        self._check_numbers(schema, path)
        self._check_dependent(schema, path)
        keyword = unsupported_keyword(schema)
        if keyword:
            self._fail(path, f"the keyword {keyword!r} is not supported")
        self._check_patterns(schema, path)
        self._num_enum_values += len(schema.get("enum", ()))
        if self._num_enum_values > MAX_ENUM_VALUES:
            self._fail(path, f"a schema may list at most {MAX_ENUM_VALUES} values")

    def _check_numbers(self, schema: dict[str, Any], path: str) -> None:
        for key in _NUMBERS:
            value = schema.get(key, 1)
            if isinstance(value, bool) or not isinstance(value, int | float):
                self._fail(path, f"{key!r} must be a number")
        if schema.get("multipleOf", 1) <= 0:
            self._fail(path, "'multipleOf' must be greater than 0")

    def _check_dependent(self, schema: dict[str, Any], path: str) -> None:
        for key in ("dependentRequired", "dependencies"):
            dependent = schema.get(key, {})
            if not isinstance(dependent, dict):
                self._fail(path, f"{key!r} must be an object")
            for names in dependent.values():
                if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
                    self._fail(path, f"{key!r} must hold lists of strings")

    def _check_patterns(self, schema: dict[str, Any], path: str) -> None:
        for pattern in (*schema.get("patternProperties", ()), schema.get("pattern", "")):
            try:
                check_regex(pattern, "pattern")
            except InvalidRequest as error:
                self._fail(path, error.message.rstrip("."))

    # A schema that refers directly to itself allows no value at all.
    def _check_loops(self) -> None:
        done: set[int] = set()
        for start in self._references:
            trail: list[int] = []
            self._follow(start, trail, done)

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
        try:
            return resolve_reference(self._root, reference)
        except ValueError as error:
            self._fail("#", str(error))


def resolve_reference(root: Any, reference: Any) -> Any:
    """Return the schema to which a `$ref` refers.

    Args:
        root: the whole schema.
        reference: the value of `$ref`: `#` and a JSON pointer.

    Raises:
        ValueError: there is no such schema, or it is in another document.
    """
    shown = f"the $ref {str(reference)[:80]!r}"
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise ValueError(f"{shown} must begin with '#'")
    first, *parts = unquote(reference[1:]).split("/")
    node = None if first else root
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        else:
            node = node.get(key) if isinstance(node, dict) else None
    if node is None:
        raise ValueError(f"{shown} points nowhere")
    return node


def unsupported_keyword(schema: dict[str, Any]) -> str:
    """Return the first keyword of a schema that no library follows exactly; empty if there is none.

    A keyword may be supported in some forms only.
    """
    for key in ("$dynamicRef", "$recursiveRef"):
        if key in schema:
            return key
    if "array" in schema.get("type", "array"):
        if schema.get("uniqueItems", False) is not False and schema.get("maxItems", 2) > 1:
            return "uniqueItems"
        if "contains" in schema and (schema.get("minContains") != 0 or "maxContains" in schema):
            return "contains"
    decides = not isinstance(schema.get("if", True), bool)
    if decides and {"then", "else"} & schema.keys():
        return "if"
    return "" if _can_be_denied(schema.get("not", False), schema) else "not"


def _can_be_denied(denied: Any, beside: dict[str, Any]) -> bool:
    if isinstance(denied, bool):
        return True
    if not isinstance(denied, dict):
        return False
    keywords = denied.keys() - _ANNOTATIONS
    if keywords == {"type"}:
        types = denied["type"]
        listed = types if isinstance(types, list) else [types]
        # There is no keyword for "numbers that are not integers".
        return "integer" not in listed or "number" in listed
    return not keywords or (
        keywords <= {"enum", "const"} and bool({"enum", "const"} & beside.keys())
    )


def check_well_formed(schemas: Iterable[tuple[Any, str]]) -> None:
    """Refuse invalid JSON schemas. This is for schemas that are not used as grammars.

    Args:
        schemas: each schema with its name in error messages. The total size is limited.

    Raises:
        InvalidRequest: a schema is refused; the message names the position in the schema.
    """
    left = MAX_SCHEMA_NODES
    for schema, name in schemas:
        check = _WellFormed(schema, name, left)
        check.run()
        left -= check.num_nodes


def check_schema(schema: Any, name: str = "json_schema") -> None:
    """Refuse a schema that is invalid, too large, or not followed exactly by the libraries.

    Raises:
        InvalidRequest: the schema is refused; the message names the position in the schema.
    """
    _Check(schema, name).run()
