"""Rewrites a JSON schema with fewer keywords and the same meaning, for all grammar libraries.

In the result, references lead only to `$defs`. Annotations are removed, and so are keywords that do
not restrict values of the schema's `type`. If a keyword's meaning cannot be expressed, the schema
is refused, and the message names the keyword.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NoReturn

from runtime.grammar.grammar_backend import GrammarError
from runtime.grammar.schema_check import resolve_reference, unsupported_keyword
from runtime.grammar.schema_disjoint import (
    KINDS,
    Disjoint,
    kind_of,
    kinds_of_types,
    listed_values,
    required_names,
    same,
)
from runtime.grammar.string_formats import FORMATS

NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
STRING_KEYWORDS = ("minLength", "maxLength", "pattern", "format")
ARRAY_KEYWORDS = (
    "prefixItems",
    "items",
    "minItems",
    "maxItems",
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "unevaluatedItems",
)
OBJECT_KEYWORDS = (
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "unevaluatedProperties",
)
_OF_KIND = (
    (NUMBER_KEYWORDS, {"integer", "fraction"}),
    (STRING_KEYWORDS, {"string"}),
    (ARRAY_KEYWORDS, {"array"}),
    (OBJECT_KEYWORDS, {"object"}),
)
_KEYWORDS = frozenset(
    {"$ref", "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then", "else"}
    | {key for keys, _ in _OF_KIND for key in keys}
)
# Keywords that apply further schemas to the same value. What `unevaluatedProperties` means depends
# on the properties that those schemas name.
_APPLICATORS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "not", "dependentSchemas"})
# Larger integers lose precision, because the libraries compute with floating-point numbers.
_MIN_INTEGER, _MAX_INTEGER = -(2**63), 2**63 - 1


def rewritten(schema: Any) -> Any:
    """Return an equivalent schema with fewer keywords.

    Args:
        schema: a schema that `check_schema` has accepted.

    Returns:
        A boolean or an object. All references have the form `#/$defs/name`. The schema and its
        inner schemas have no other keywords than `$ref`, `type`, `enum`, `allOf`, `anyOf`,
        `minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`, `multipleOf`, `pattern`,
        `minLength`, `maxLength`, a `format` that all libraries know, `prefixItems`, `items`,
        `minItems`, `maxItems`, `properties`, `required`, `additionalProperties`,
        `patternProperties`, `minProperties` and `maxProperties`.

    Raises:
        GrammarError: a keyword's meaning cannot be expressed; the message names the keyword and its
            position.
    """
    return _Rewriter(schema).run()


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._disjoint = Disjoint(self._resolve)
        self._names: dict[int, str] = {}
        self._waiting: list[tuple[str, Any, str]] = []

    def run(self) -> Any:
        schema = self._schema(self._root, "#")
        definitions: dict[str, Any] = {}
        # References are followed in a loop: a long chain of them would exceed the recursion limit.
        while self._waiting:
            name, target, path = self._waiting.pop()
            definitions[name] = self._schema(target, path)
        if schema is False:
            _fail("#", "no value can follow it")
        if definitions and isinstance(schema, dict):
            schema["$defs"] = definitions
        return schema

    def _resolve(self, reference: Any) -> Any:
        try:
            return resolve_reference(self._root, reference)
        except ValueError as error:
            raise GrammarError(str(error)) from None

    def _name_of(self, reference: str) -> str:
        target = self._resolve(reference)
        if id(target) not in self._names:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self._waiting.append((name, target, reference))
        return self._names[id(target)]

    def _schema(self, schema: Any, path: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            _fail(path, "a schema must be an object or a boolean")
        keyword = unsupported_keyword(schema)
        if keyword:
            _fail(path, f"the keyword {keyword!r} is not supported")
        copy = {key: value for key, value in schema.items() if key in _KEYWORDS}
        kinds = kinds_of_types(copy["type"]) if "type" in copy else KINDS
        for keywords, concerned in _OF_KIND:
            if not kinds & concerned:
                for key in keywords:
                    copy.pop(key, None)
        for rule in _RULES:
            if rule(copy, kinds) is False:
                return False
        self._names_of_properties(copy, path)
        self._unevaluated(copy, path)
        if not self._one_of(copy, kinds, path):
            return False
        return self._inner(copy, path)

    def _inner(self, copy: dict[str, Any], path: str) -> Any:
        """Rewrite the schemas inside a schema."""
        if "$ref" in copy:
            copy["$ref"] = f"#/$defs/{self._name_of(copy['$ref'])}"
        for key in ("properties", "patternProperties"):
            if key in copy:
                copy[key] = {
                    name: self._schema(each, f"{path}/{key}/{name[:40]}")
                    for name, each in copy[key].items()
                }
        for key in ("items", "additionalProperties"):
            if key in copy:
                copy[key] = self._schema(copy[key], f"{path}/{key}")
        for key in ("allOf", "anyOf", "prefixItems"):
            if key in copy:
                copy[key] = [
                    self._schema(each, f"{path}/{key}/{index}")
                    for index, each in enumerate(copy[key])
                ]
        return _simplified(copy)

    def _names_of_properties(self, copy: dict[str, Any], path: str) -> None:
        """Replace `propertyNames` in `copy` by other keywords that allow the same names."""
        names = copy.pop("propertyNames", True)
        if isinstance(names, dict) and "$ref" in names and len(_of_strings(names)) == 1:
            names = self._resolve(names["$ref"])
        if isinstance(names, dict):
            names = _of_strings(names)
        if names is True or names == {}:
            return
        if names is False:
            copy["maxProperties"] = 0
            return
        alone = not {"properties", "patternProperties"} & copy.keys()
        rest = copy.get("additionalProperties", True) if alone else True
        only: dict[str, Any] = {"additionalProperties": False}
        if names.keys() <= {"enum", "const"}:
            listed = [name for name in listed_values(names) or [] if isinstance(name, str)]
            only["properties"] = dict.fromkeys(listed, rest)
        else:
            pattern = _pattern_of_names(names)
            if pattern is None:
                _fail(path, "'propertyNames' is not supported in this form")
            only["patternProperties"] = {pattern: rest}
        if alone:
            copy |= only
        else:
            copy["allOf"] = [*copy.get("allOf", ()), only]

    def _unevaluated(self, copy: dict[str, Any], path: str) -> None:
        """Replace `unevaluatedProperties` and `unevaluatedItems` by equivalent keywords."""
        items = copy.pop("unevaluatedItems", True)
        if items not in (True, {}) and "items" not in copy:
            if _APPLICATORS & copy.keys():
                _fail(path, "'unevaluatedItems' beside other schemas is not supported")
            copy["items"] = items
        rest = copy.pop("unevaluatedProperties", True)
        if rest in (True, {}) or "additionalProperties" in copy:
            return
        if _APPLICATORS & copy.keys():
            seen: dict[str, Any] = {}
            for part in self._disjoint.parts(copy):
                if (_APPLICATORS - {"$ref", "allOf"}) & part.keys() or (
                    part is not copy and {"patternProperties", "additionalProperties"} & part.keys()
                ):
                    _fail(path, "'unevaluatedProperties' beside such schemas is not supported")
                seen |= dict.fromkeys(part.get("properties", ()), True)
            copy["properties"] = seen | copy.get("properties", {})
        copy["additionalProperties"] = rest

    def _one_of(self, copy: dict[str, Any], kinds: frozenset[str], path: str) -> bool:
        """Replace `oneOf` by an `anyOf` of schemas that have no common values.

        Two object schemas may overlap if one requires a property that the other does not name. Then
        the other schema is changed to forbid this property.

        Returns:
            False if no schema of the `oneOf` can be satisfied.
        """
        if "oneOf" not in copy:
            return True
        branches = [each for each in copy.pop("oneOf") if each is not False]
        listed = listed_values(copy)
        if listed is not None:
            kinds &= {kind_of(each) for each in listed}
        given = list(branches)
        for place in range(len(given)):
            for other in range(place):
                if not self._disjoint.apart(given[place], given[other], kinds):
                    for one, rest in ((place, other), (other, place)):
                        name = self._only_in(given[rest], given[one], kinds, path)
                        branches[one] = _without(branches[one], name)
        either = {"anyOf": branches}
        if "anyOf" in copy:
            copy["allOf"] = [*copy.get("allOf", ()), either]
        else:
            copy |= either
        return bool(branches)

    def _only_in(self, asks: Any, other: Any, kinds: frozenset[str], path: str) -> str:
        """Return a property that the schema `asks` requires and the schema `other` lacks.

        Such a property tells two alternatives of a `oneOf` apart.

        Raises:
            GrammarError: there is no such property.
        """
        names: list[str] = []
        if self._disjoint.kinds(asks) & self._disjoint.kinds(other) & kinds == {"object"}:
            mentioned = {
                name
                for part in self._disjoint.parts(other)
                for name in (*part.get("properties", ()), *part.get("required", ()))
            }
            asked = required_names(self._disjoint.parts(asks))
            names = [name for name in asked if name not in mentioned]
        if not names:
            what = "'oneOf' of schemas that one value may follow together is not supported"
            _fail(path, f"{what}; anyOf is")
        return names[0]


def _fail(path: str, what: str) -> NoReturn:
    raise GrammarError(f"at {path[:200]}: {what}")


def _simplified(copy: dict[str, Any]) -> Any:
    """Remove schemas that allow everything or nothing from `allOf` and `anyOf`."""
    if "allOf" in copy:
        if False in copy["allOf"]:
            return False
        copy["allOf"] = [each for each in copy["allOf"] if each not in (True, {})]
        if not copy["allOf"]:
            del copy["allOf"]
        elif copy.keys() == {"allOf"} and len(copy["allOf"]) == 1:
            return copy["allOf"][0]
    if "anyOf" in copy:
        copy["anyOf"] = [each for each in copy["anyOf"] if each is not False]
        if not copy["anyOf"]:
            return False
    return copy


def _without(schema: Any, name: str) -> Any:
    """Return a schema with the additional rule that the property `name` is forbidden."""
    if isinstance(schema, dict):
        return schema | {"properties": {**schema.get("properties", {}), name: False}}
    return {"properties": {name: False}}


def _trivial_conditions(copy: dict[str, Any], kinds: frozenset[str]) -> bool | None:
    """Remove `if` with a constant condition, and express `not` by `type` or `enum`.

    `not` is about types or about listed values here. Returns false if no value is allowed, else
    `None`.
    """
    condition = copy.pop("if", None)
    ways = {True: copy.pop("then", True), False: copy.pop("else", True)}
    if isinstance(condition, bool):
        copy["allOf"] = [*copy.get("allOf", ()), ways[condition]]
    denied = copy.pop("not", False)
    if denied is True or denied == {}:
        return False
    if isinstance(denied, dict):
        if "type" in denied:
            left = kinds - kinds_of_types(denied["type"])
            copy["type"] = [each for each in sorted(left) if each != "fraction"]
            if "fraction" in left:
                copy["type"] = [*(each for each in copy["type"] if each != "integer"), "number"]
        else:
            values, gone = listed_values(copy), listed_values(denied)
            copy.pop("const", None)
            copy["enum"] = [
                each for each in values or () if not any(same(each, other) for other in gone or ())
            ]
    return None


def _values(copy: dict[str, Any], _: frozenset[str]) -> bool | None:
    """Combine `enum` and `const` into one list of values of the right type.

    Returns false if no value is allowed, else `None`.
    """
    values = listed_values(copy)
    if values is None:
        return bool(copy.get("type", True)) and None
    copy.pop("const", None)
    if "type" in copy:
        kinds = kinds_of_types(copy.pop("type"))
        values = [each for each in values if kind_of(each) in kinds]
        for keywords, concerned in _OF_KIND:
            if not {kind_of(each) for each in values} & concerned:
                for key in keywords:
                    copy.pop(key, None)
    copy["enum"] = values
    return None if values else False


def _numbers(copy: dict[str, Any], kinds: frozenset[str]) -> None:
    """If only integers are allowed, replace all bounds by inclusive integer bounds."""
    if "fraction" in kinds or "integer" not in kinds:
        return
    low, high = copy.pop("minimum", None), copy.pop("maximum", None)
    above, below = copy.pop("exclusiveMinimum", None), copy.pop("exclusiveMaximum", None)
    lows = [
        *([] if low is None else [math.ceil(low)]),
        *([] if above is None else [math.floor(above) + 1]),
    ]
    highs = [
        *([] if high is None else [math.floor(high)]),
        *([] if below is None else [math.ceil(below) - 1]),
    ]
    if lows:
        copy["minimum"] = max(*lows, _MIN_INTEGER)
    if highs:
        copy["maximum"] = min(*highs, _MAX_INTEGER)
    if "multipleOf" in copy:
        step = Fraction(str(copy.pop("multipleOf"))).numerator
        if step != 1:
            copy["multipleOf"] = step


def _strings(copy: dict[str, Any], _: frozenset[str]) -> None:
    """Replace formats by patterns; remove length limits that every text of the format meets."""
    name = copy.get("format")
    known = FORMATS.get(name) if isinstance(name, str) else None
    if known is None:
        copy.pop("format", None)
    else:
        if copy.get("minLength", 0) <= known.shortest:
            copy.pop("minLength", None)
        if known.longest is not None and copy.get("maxLength", known.longest) >= known.longest:
            copy.pop("maxLength", None)
        if known.pattern:
            del copy["format"]
            pattern = f"^{known.pattern}$"
            if "pattern" in copy:
                copy["allOf"] = [*copy.get("allOf", ()), {"pattern": pattern}]
            else:
                copy["pattern"] = pattern
    if copy.get("pattern") == "":
        del copy["pattern"]
    if copy.get("minLength") == 0:
        del copy["minLength"]


def _arrays(copy: dict[str, Any], _: frozenset[str]) -> None:
    """Remove keywords about arrays that have no effect."""
    for key in ("uniqueItems", "contains", "minContains", "maxContains"):
        copy.pop(key, None)
    if "maxItems" in copy and len(copy.get("prefixItems", ())) > copy["maxItems"]:
        copy["prefixItems"] = copy["prefixItems"][: copy["maxItems"]]
        if not copy["prefixItems"]:
            del copy["prefixItems"]
    if copy.get("minItems") == 0:
        del copy["minItems"]


def _objects(copy: dict[str, Any], _: frozenset[str]) -> None:
    """Replace dependencies by alternatives: the property is absent, or its rule holds."""
    choices: list[Any] = [
        {"anyOf": [{"properties": {name: False}}, {"required": [name, *names]}]}
        for key in ("dependentRequired", "dependencies")
        for name, names in copy.pop(key, {}).items()
    ]
    choices += [
        {"anyOf": [{"properties": {name: False}}, {"allOf": [{"required": [name]}, each]}]}
        for name, each in copy.pop("dependentSchemas", {}).items()
    ]
    if choices:
        copy["allOf"] = [*copy.get("allOf", ()), *choices]
    required = set(copy.get("required", ()))
    if not required:
        copy.pop("required", None)
    if "minProperties" in copy and copy["minProperties"] <= len(required):
        del copy["minProperties"]
    is_closed = copy.get("additionalProperties") is False and "patternProperties" not in copy
    if is_closed and len(copy.get("properties", ())) <= copy.get("maxProperties", -1):
        del copy["maxProperties"]


_RULES: tuple[Callable[[dict[str, Any], frozenset[str]], bool | None], ...] = (
    _trivial_conditions,
    _values,
    _numbers,
    _strings,
    _arrays,
    _objects,
)


def _of_strings(names: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of a schema for property names, without those that always hold."""
    types = names.get("type", "string")
    return {
        key: value
        for key, value in names.items()
        if key in _KEYWORDS and (key != "type" or "string" not in types)
    }


def _pattern_of_names(names: dict[str, Any]) -> str | None:
    if names.keys() == {"pattern"}:
        return str(names["pattern"])
    if names.keys() == {"format"}:
        known = FORMATS.get(names["format"])
        return f"^{known.pattern}$" if known is not None and known.pattern else None
    if names.keys() <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return None
