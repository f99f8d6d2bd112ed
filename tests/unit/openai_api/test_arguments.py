"""Arguments as JSON: which text the scanner accepts, and how argument texts are converted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openai_api.call_arguments import arguments_object
from openai_api.json_scan import MAX_DEPTH, JsonValue
from openai_api.tool_parsers.typed_values import json_of, types_of

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
# Pieces that meet at every border of the grammar.
PIECES = st.lists(
    st.sampled_from(
        [*'{}[],:"\\-+.eE01 \n\tx', "true", "fals", "null", "\\u00e9", "\\uD8", '"a"', "12", "é"]
    ),
    max_size=10,
).map("".join)


def is_value(text: str) -> bool:
    """What the standard library says; it takes a few words more than JSON has."""
    try:
        json.loads(text, parse_constant=lambda word: pytest.fail(word))
    except ValueError:
        return False
    return True


def scanned(pieces: list[str]) -> tuple[bool, bool, int]:
    value, read = JsonValue(), 0
    for piece in pieces:
        if not (value.is_done or value.is_broken):
            read += value.feed(piece)
    return value.is_done, value.is_broken, read


@given(value=VALUES, indent=st.sampled_from([None, 1]), is_ascii=st.booleans())
def test_all_json_is_read_to_its_end(value: Any, indent: int | None, is_ascii: bool) -> None:
    text = json.dumps({"a": value}, indent=indent, ensure_ascii=is_ascii)
    assert scanned([text, "}"]) == (True, False, len(text))
    assert scanned([*text, "}"]) == (True, False, len(text))
    # Any beginning of it may go on.
    for end in range(0, len(text), 5):
        assert scanned([text[:end]]) == (False, False, end)


@given(text=PIECES)
def test_nothing_else_is(text: str) -> None:
    whole = scanned([f"[{text}]"])
    assert scanned(list(f"[{text}]")) == whole
    is_done, is_broken, read = whole
    assert (is_done and read == len(text) + 2) == is_value(f"[{text}]")
    if is_broken:
        # Where it stopped, nothing that begins so is JSON.
        broken = f"[{text}]"[: read + 1]
        assert not any(is_value(broken + end) for end in ("", "]", '"]', "0]", "}]", '":0}]'))


def test_depth_is_bounded_where_it_is_asked_for() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    value = JsonValue(MAX_DEPTH)
    assert (value.feed(deep), value.is_done) == (len(deep), True)
    value = JsonValue(MAX_DEPTH)
    assert (value.feed(f"[{deep}]"), value.is_broken) == (MAX_DEPTH, True)
    deeper = "[" * 100_000 + "]" * 100_000
    assert scanned([deeper]) == (True, False, len(deeper))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ('{"a": 1, "b": "cut o', {"a": 1}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": "\\ud800"}', {}),
        ("{", {}),
        ("", {}),
        ("[1]", {}),
    ],
)
def test_objects_of_arguments(text: str, expected: dict[str, Any]) -> None:
    assert arguments_object(text) == expected


SCHEMA: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "list": {"type": "array"},
        "object": {"$ref": "#/$defs/thing"},
        "unit": {"enum": ["m", "km"]},
        "spaced": {"type": "string", "enum": [" a", "b"]},
        "word or text": {"anyOf": [{"enum": ["m"]}, {"type": "string"}]},
        "fixed": {"const": 3},
        "loop": {"$ref": "#/properties/loop"},
        "odd": 5,
    },
    "$defs": {"thing": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("text", "5", '"5"'),
        ("text", 'a "b"\n\\', '"a \\"b\\"\\n\\\\"'),
        ("count", " 12 ", "12"),
        ("count", "3.0", "3"),
        ("count", "3.5", '"3.5"'),
        ("count", "99999999999999999999999", "99999999999999999999999"),
        ("share", "1e-3", "1e-3"),
        ("share", "NaN", '"NaN"'),
        ("flag", "True", "true"),
        ("flag", "no", '"no"'),
        ("maybe", "None", "null"),
        ("maybe", "7", "7"),
        ("either", "7", "7"),
        ("either", "seven", '"seven"'),
        ("list", '["a", {"b": 1}]', '["a", {"b": 1}]'),
        ("list", "[1", '"[1"'),
        ("object", '{"a": 1}', '{"a": 1}'),
        ("unit", "km", '"km"'),
        # A word of the schema's has no blanks around it, unless some have.
        ("unit", "\t km \n", '"km"'),
        ("spaced", " a", '" a"'),
        ("word or text", " m ", '" m "'),
        ("fixed", "3", "3"),
        # Nothing said: lists and objects are what they look like, the rest is text.
        ("unknown", '{"a": 1}', '{"a": 1}'),
        ("unknown", "5", '"5"'),
        ("loop", "x", '"x"'),
        ("odd", "x", '"x"'),
    ],
)
def test_texts_become_the_type_of_their_schema(name: str, text: str, expected: str) -> None:
    assert json_of(text, types_of(SCHEMA, name)) == expected


@pytest.mark.parametrize("schema", [{}, {"properties": None}, {"properties": []}])
def test_schemas_that_say_nothing(schema: dict[str, Any]) -> None:
    assert types_of(schema, "a") == frozenset()
