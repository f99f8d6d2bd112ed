"""Which grammars are refused before a library sees them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from runtime.errors import InvalidRequest
from runtime.grammar.limits import check_grammar
from runtime.requests.sampling_params import GrammarKind, GrammarSpec, SamplingFields, grammar_of


def refusal(kind: GrammarKind, text: str) -> str:
    started = time.thread_time()
    with pytest.raises(InvalidRequest) as caught:
        check_grammar(GrammarSpec(kind, text))
    assert time.thread_time() - started < 1.0
    assert caught.value.param in (kind, "pattern")
    assert len(caught.value.message) < 500
    return caught.value.message


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a+)+b", "repeat inside a repeat"),
        ("(a*)*b", "repeat inside a repeat"),
        ("((a+))+", "repeat inside a repeat"),
        ("(x|a+)*", "repeat inside a repeat"),
        ("(a?){1,2000}b", "repeat inside a repeat"),
        ("(?:a*)+", "repeat inside a repeat"),
        ("(a|a){1,5000}", "multiply"),
        ("((ab{1,100}c){1,100}d){1,100}", "multiply"),
        ("a{99999999999999999999}", "multiply"),
        ("a" * 1_000_000, "16384 characters"),
        ("(" * 30_000, "16384 characters"),
        ("(" * 5_000 + "a" + ")" * 5_000, "64 groups"),
        ("(?=a)b", "lookahead"),
        ("(?<!a)b", "lookahead"),
    ],
)
def test_hostile_regexes_are_refused(pattern: str, why: str) -> None:
    assert why in refusal("regex", pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(yes|no)",
        r"(\d+,)*\d+",
        r"((25[0-5]|2[0-4]\d|[01]?\d\d?).){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)",
        r"[a-z+*(]{2,20}\)\(",
        "(a{3}){4}",
        r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?",
        "(?P<year>[0-9]{4})-(?:[0-9]{2})",
        ")",
        "a{,3}b{",
        "[",
    ],
)
def test_other_regexes_are_the_compilers_business(pattern: str) -> None:
    check_grammar(GrammarSpec("regex", pattern))


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": 5}, "at #: 'type'"),
        ({"type": "strin"}, "'type' must be one of"),
        ({"type": "string", "pattern": 7}, "'pattern' must be a string"),
        ({"type": "string", "pattern": "(a+)+"}, "repeat inside a repeat"),
        ({"properties": {"a": {"enum": []}}}, "at #/properties/a: 'enum'"),
        ({"enum": list(range(6_000))}, "at most 5000 values"),
        ({"properties": {f"p{i}": {} for i in range(10_000)}}, "at most 2000 properties"),
        ({"$ref": "#"}, "leads back to itself"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            "leads back to itself",
        ),
        ({"anyOf": [{"$ref": "#"}, INTEGER]}, "leads back to itself"),
        ({"$ref": "#/$defs/none"}, "points nowhere"),
        ({"$ref": "https://example.com/schema"}, "must begin with '#'"),
        ({"not": INTEGER}, "'not' is not supported"),
        ({"not": {"type": 5}}, "at #/not: 'type'"),
        ({"not": {"type": ["string", "integer"]}}, "'not' is not supported"),
        ({"type": "array", "items": INTEGER, "uniqueItems": True}, "'uniqueItems'"),
        ({"if": INTEGER, "then": INTEGER}, "'if' is not supported"),
        ({"type": "array", "items": [INTEGER]}, "object or a boolean"),
        ({"type": "string", "maxLength": 10**9}, "'maxLength' must be"),
        ({"type": "integer", "exclusiveMinimum": True}, "'exclusiveMinimum' must be a number"),
        ({"multipleOf": 0}, "'multipleOf' must be greater than 0"),
        ({"dependentRequired": {"a": "b"}}, "'dependentRequired' must hold lists of strings"),
        ({"contains": INTEGER}, "'contains' is not supported"),
        ({"propertyNames": {"pattern": "(a+)+"}}, "repeat inside a repeat"),
        ({"$ref": "#/x", "x": {"pattern": "(a+)+"}}, "repeat inside a repeat"),
        ({"$ref": "#x", "x": INTEGER}, "points nowhere"),
        ({"anyOf": []}, "at least one schema"),
        ({"properties": []}, "'properties' must be an object"),
        ([], "must be an object or a boolean"),
    ],
)
def test_schemas_that_would_not_be_followed_are_refused(schema: Any, why: str) -> None:
    assert why in refusal("json_schema", json.dumps(schema))


def test_deep_schemas_are_refused() -> None:
    nested: dict[str, Any] = INTEGER
    for _ in range(100):
        nested = {"type": "array", "items": nested}
    assert "nest at most 64" in refusal("json_schema", json.dumps(nested))
    assert "not valid JSON" in refusal("json_schema", '{"items":' * 10_000)
    assert "bytes" in refusal("json_schema", '"' + "a" * 1_000_000 + '"')
    assert "not valid JSON" in refusal("json_schema", "{")
    assert "not valid JSON" in refusal("json_schema", '"\ud800"')


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": ["integer", "null"], "minimum": 0},
        {"allOf": [INTEGER, {"minimum": 1}], "not": {"type": "null"}, "multipleOf": 0.5},
        {"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": INTEGER}},
        {"type": "object", "required": ["a"], "dependentRequired": {"a": ["b"]}},
        {
            "title": "Person",
            "type": "object",
            "$defs": {"Place": {"type": "object", "properties": {"city": {"type": "string"}}}},
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 20},
                "home": {"$ref": "#/$defs/Place", "description": "where"},
                "friends": {"type": "array", "items": {"$ref": "#"}, "maxItems": 3},
                "pet": {"anyOf": [{"const": "cat"}, {"enum": ["dog", 1, None]}]},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
    ],
)
def test_usual_schemas_pass(schema: Any) -> None:
    check_grammar(GrammarSpec("json_schema", json.dumps(schema)))


def test_other_kinds() -> None:
    assert "brackets" in refusal("ebnf", "root ::= " + "(" * 30_000)
    assert "characters" in refusal("ebnf", "a" * 100_000)
    assert "object" in refusal("structural_tag", "[]")
    assert "structures" in refusal("structural_tag", '{"structures": 5}')
    tag = {"format": {"type": "json_schema", "json_schema": {"type": 5}}}
    assert "'type'" in refusal("structural_tag", json.dumps(tag))
    deep = '{"a":' * 200 + "1" + "}" * 200
    assert "nest" in refusal("structural_tag", deep)


def test_at_most_one_constraint() -> None:
    assert grammar_of(SamplingFields(regex="", ebnf="")) is None
    assert grammar_of(SamplingFields(regex="a", ebnf="")) == GrammarSpec("regex", "a")
    for other in ("json_schema", "ebnf", "structural_tag"):
        with pytest.raises(InvalidRequest, match="Only one constraint"):
            grammar_of(SamplingFields(**{"regex": "a", other: "{}"}))
