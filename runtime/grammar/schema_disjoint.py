"""Proves that two JSON schemas have no common value, which `oneOf` needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# The kinds of values: JSON's types, but with integers and other numbers ("fraction") apart.
KINDS = frozenset({"null", "boolean", "object", "array", "string", "integer", "fraction"})
_MAX_DEPTH = 6


def kinds_of_types(types: Any) -> frozenset[str]:
    """Return the kinds of values that a value of the keyword `type` allows."""
    listed = [types] if isinstance(types, str) else types
    kinds = {"integer", "fraction"} if "number" in listed else set()
    return frozenset(kinds | {each for each in listed if each != "number"})


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value, one of `KINDS`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "fraction"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def same(left: Any, right: Any) -> bool:
    """Whether two JSON values are equal: 1 equals 1.0, but neither equals true."""
    if kind_of(left) != kind_of(right):
        return False
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right)


def listed_values(schema: dict[str, Any]) -> list[Any] | None:
    """Return the values that `enum` and `const` allow; `None` if the schema has neither."""
    values = schema.get("enum")
    if "const" in schema:
        const = schema["const"]
        if values is not None and not any(same(const, each) for each in values):
            return []
        return [const]
    return values


class Disjoint:
    """Compares the schemas of one document.

    If it cannot prove that two schemas are disjoint, they count as overlapping. It does not compare
    `pattern`, `multipleOf` and the items of arrays.
    """

    def __init__(self, resolve: Callable[[Any], Any]) -> None:
        """Use `resolve` to find the schema of a `$ref`."""
        self._resolve = resolve

    def parts(self, schema: Any) -> list[dict[str, Any]]:
        """Return all schemas that a value must satisfy: the schema, its references, its `allOf`."""
        found: list[dict[str, Any]] = []
        stack, seen = [schema], set[int]()
        while stack:
            part = stack.pop()
            if part is True or id(part) in seen:
                continue
            seen.add(id(part))
            if not isinstance(part, dict):
                found.append({"enum": []})
                continue
            found.append(part)
            stack += part.get("allOf", ())
            if "$ref" in part:
                stack.append(self._resolve(part["$ref"]))
        return found

    def kinds(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """Return the kinds of values that a schema may allow."""
        kinds = KINDS
        for part in self.parts(schema):
            if "type" in part:
                kinds &= kinds_of_types(part["type"])
            values = listed_values(part)
            if values is not None:
                kinds &= {kind_of(value) for value in values}
            for branches in _unions(part):
                if depth < _MAX_DEPTH:
                    kinds &= frozenset().union(*(self.kinds(each, depth + 1) for each in branches))
        return kinds

    def apart(self, left: Any, right: Any, within: frozenset[str] = KINDS, depth: int = 0) -> bool:
        """Whether it is proven that no value satisfies both schemas.

        Args:
            left: a schema.
            right: the other schema.
            within: the kinds of values to consider.
            depth: depth of the recursion, which is limited.
        """
        if depth > _MAX_DEPTH:
            return False
        kinds = self.kinds(left) & self.kinds(right) & within
        if not kinds:
            return True
        ours, theirs = self.parts(left), self.parts(right)
        for parts, other in ((ours, right), (theirs, left)):
            for branches in (each for part in parts for each in _unions(part)):
                if all(self.apart(each, other, kinds, depth + 1) for each in branches):
                    return True
        return all(self._apart_in(kind, ours, theirs, depth) for kind in kinds)

    def _apart_in(
        self, kind: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], depth: int
    ) -> bool:
        mine, other = _values(ours), _values(theirs)
        if mine is not None and other is not None:
            return not any(same(a, b) for a in mine for b in other)
        match kind:
            case "integer" | "fraction":
                return _above(ours, theirs) or _above(theirs, ours)
            case "string":
                return _longer(ours, theirs, "Length") or _longer(theirs, ours, "Length")
            case "array":
                return _longer(ours, theirs, "Items") or _longer(theirs, ours, "Items")
            case "object":
                return self._objects_apart(ours, theirs, depth)
        return False

    def _objects_apart(
        self, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], depth: int
    ) -> bool:
        names = dict.fromkeys([*required_names(ours), *required_names(theirs)])
        return any(
            self.apart(mine, other, KINDS, depth + 1)
            for name in names
            for mine in _of_property(ours, name)
            for other in _of_property(theirs, name)
        )


def required_names(parts: list[dict[str, Any]]) -> list[str]:
    """Return the names of the properties that the parts of a schema require."""
    return [name for part in parts for name in part.get("required", ())]


def _unions(part: dict[str, Any]) -> Iterator[list[Any]]:
    for key in ("anyOf", "oneOf"):
        if key in part:
            yield part[key]


def _values(parts: list[dict[str, Any]]) -> list[Any] | None:
    for part in parts:
        values = listed_values(part)
        if values is not None:
            return values
    return None


def _of_property(parts: list[dict[str, Any]], name: str) -> list[Any]:
    """Return the schemas that apply to the property `name`; `[True]` if none does."""
    found = [part["properties"][name] for part in parts if name in part.get("properties", ())]
    found += [
        part["additionalProperties"]
        for part in parts
        if "additionalProperties" in part
        and "patternProperties" not in part
        and name not in part.get("properties", ())
    ]
    return found or [True]


def _above(upper: list[dict[str, Any]], lower: list[dict[str, Any]]) -> bool:
    """Whether each number that `upper` allows is greater than each that `lower` allows."""
    for low, low_is_in in _bounds(upper, "minimum", "exclusiveMinimum"):
        for high, high_is_in in _bounds(lower, "maximum", "exclusiveMaximum"):
            if low > high or (low == high and not (low_is_in and high_is_in)):
                return True
    return False


def _bounds(
    parts: list[dict[str, Any]], inclusive: str, exclusive: str
) -> Iterator[tuple[float, bool]]:
    for part in parts:
        if inclusive in part:
            yield part[inclusive], True
        if exclusive in part:
            yield part[exclusive], False


def _longer(upper: list[dict[str, Any]], lower: list[dict[str, Any]], what: str) -> bool:
    least = max((part.get(f"min{what}", 0) for part in upper), default=0)
    return any(part[f"max{what}"] < least for part in lower if f"max{what}" in part)
