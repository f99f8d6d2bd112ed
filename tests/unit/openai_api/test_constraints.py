"""Constraints on an answer: fields of every server, one per request, none ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from openai_api.constraints import requested_constraint
from openai_api.schemas import chat, completions
from runtime.errors import InvalidRequest
from runtime.requests.sampling_params import GrammarSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
ANY_OBJECT = GrammarSpec("json_schema", '{"type":"object"}')


def asked(**fields: Any) -> list[GrammarSpec | None]:
    """What a chat's and a text completion's body ask for."""
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    chat_body = chat.DECODER.decode(json.dumps(body).encode())
    text_body = completions.DECODER.decode(json.dumps({"prompt": "a", **fields}).encode())
    return [requested_constraint(chat_body), requested_constraint(text_body)]


def packed(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


BY_SCHEMA = GrammarSpec("json_schema", packed(SCHEMA))
CASES: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}, "regex": "", "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    ({"response_format": {"type": "json_object", "schema": None}}, ANY_OBJECT),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, BY_SCHEMA),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, BY_SCHEMA),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, BY_SCHEMA),
    ({"response_format": TAG}, GrammarSpec("structural_tag", packed(TAG))),
    ({"regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"ebnf": "root ::= a"}, GrammarSpec("ebnf", "root ::= a")),
    ({"grammar": "root ::= a"}, GrammarSpec("ebnf", "root ::= a")),
    ({"json_schema": SCHEMA}, BY_SCHEMA),
    ({"json_schema": '{"a": 1}'}, GrammarSpec("json_schema", '{"a": 1}')),
    ({"guided_json": SCHEMA}, BY_SCHEMA),
    ({"guided_json": packed(SCHEMA)}, BY_SCHEMA),
    ({"guided_regex": "a+"}, GrammarSpec("regex", "a+")),
    ({"guided_choice": ["a"]}, GrammarSpec("ebnf", 'root ::= "a"')),
    (
        {"guided_choice": ['"yes"', "no\\\n", "\x07 ä"]},
        GrammarSpec("ebnf", 'root ::= "\\"yes\\"" | "no\\\\\\n" | "\\x07 ä"'),
    ),
    ({"guided_grammar": "root ::= a"}, GrammarSpec("ebnf", "root ::= a")),
    # Which library makes the grammar changes no answer.
    ({"guided_regex": "a", "guided_decoding_backend": "outlines"}, GrammarSpec("regex", "a")),
    ({"structured_outputs": {"json": SCHEMA}}, BY_SCHEMA),
    ({"structured_outputs": {"json": packed(SCHEMA), "regex": None}}, BY_SCHEMA),
    ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, GrammarSpec("ebnf", 'root ::= "a" | "b"')),
    ({"structured_outputs": {"grammar": "root ::= a"}}, GrammarSpec("ebnf", "root ::= a")),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    ({"structured_outputs": {"json_object": False}}, None),
    (
        {"structured_outputs": {"structural_tag": packed(TAG)}},
        GrammarSpec("structural_tag", packed(TAG)),
    ),
    (
        {"structured_outputs": {"regex": "a", "disable_fallback": True, "whitespace_pattern": ""}},
        GrammarSpec("regex", "a"),
    ),
    ({"structured_outputs": {}}, None),
]


@pytest.mark.parametrize(("fields", "wanted"), CASES, ids=lambda each: str(each)[:60])
def test_each_field_is_understood(fields: dict[str, Any], wanted: GrammarSpec | None) -> None:
    assert asked(**fields) == [wanted, wanted]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern", "response_format"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " ?"}},
        "structured_outputs.whitespace_pattern",
        "response_format",
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "response_format",
    ),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml", "response_format"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex", "must be a string"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice", "must be a list"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "must be an object"),
    ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object", "true or false"),
    ({"guided_choice": []}, "guided_choice", "at least one string"),
    ({"regex": "a", "guided_regex": "b"}, "regex", "got regex and guided_regex"),
    (
        {"response_format": {"type": "json_object"}, "guided_choice": ["a"]},
        "response_format",
        "got response_format and guided_choice",
    ),
    (
        {"structured_outputs": {"regex": "a", "json": SCHEMA}},
        "structured_outputs.regex",
        "Only one constraint",
    ),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format", "an object"),
]


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED, ids=lambda each: str(each)[:60])
def test_what_is_not_done_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        asked(**fields)
    assert refused.value.param == param
