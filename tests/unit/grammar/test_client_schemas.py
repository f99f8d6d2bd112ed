"""Schemas that clients make from classes: their annotations do not prevent enforcement."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, SecretBytes

from runtime.requests.sampling_params import GrammarSpec
from tests.support.fake_engine import EOS_ID, byte_tokenizer
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.grammar_walk import InProcessCompiler

pytestmark = needs_grammars


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str


class Told(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Marked(BaseModel):
    size: int | None = Field(json_schema_extra={"x-unit": "cm", "example": 3})


class Files(BaseModel):
    where: Path
    key: SecretBytes


class Undecided(BaseModel):
    pet: Cat | Dog = Field(json_schema_extra=lambda schema: schema.update(one_of(schema)))


def one_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"oneOf": schema.pop("anyOf")}


@pytest.fixture(params=BACKENDS)
def compiler(request: pytest.FixtureRequest, tmp_path: Path) -> InProcessCompiler:
    return InProcessCompiler(request.param, tmp_path, byte_tokenizer(), [EOS_ID])


@pytest.mark.parametrize("is_tagged", [False, True])
@pytest.mark.parametrize(
    ("model", "good", "bad"),
    [
        (Told, '{"pet": {"kind": "cat", "lives": 9}}', '{"pet": {"kind": "cow", "lives": 9}}'),
        (Undecided, '{"pet": {"name": "Rex"}}', '{"pet": {"name": 7}}'),
        (Marked, '{"size": null}', '{"size": "x"}'),
        (Files, '{"where": "/tmp/a", "key": "b"}', '{"where": 7, "key": "b"}'),
    ],
)
async def test_they_are_followed(
    compiler: InProcessCompiler, model: type[BaseModel], good: str, bad: str, is_tagged: bool
) -> None:
    model.model_validate_json(good)
    schema = model.model_json_schema()
    spec = GrammarSpec("json_schema", json.dumps(schema))
    if is_tagged:
        content = {"type": "json_schema", "json_schema": schema}
        tag = {"format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
        spec = GrammarSpec("structural_tag", json.dumps({"type": "structural_tag", **tag}))
        good, bad = f"<a>{good}</a>", f"<a>{bad}</a>"
    payload = await compiler.compile(spec)[1]
    assert compiler.takes(payload, good)
    assert not compiler.takes(payload, bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        # A format that no library knows is a remark, the length beside it is not.
        (
            {"format": "password", "minLength": 3, "maxLength": 5},
            ["abc", "abcde"],
            ["ab", "abcdef"],
        ),
        # Every text of the format is as long, or nobody means the bound: pydantic's `HttpUrl`.
        ({"format": "date", "minLength": 1, "maxLength": 10}, ["2026-11-25"], ["1", "x" * 10]),
        ({"format": "uri", "minLength": 1, "maxLength": 2083}, ["http://a.b/c"], ["", "a b"]),
    ],
)
async def test_lengths_beside_formats(
    compiler: InProcessCompiler, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    spec = GrammarSpec("json_schema", json.dumps({"type": "string", **schema}))
    payload = await compiler.compile(spec)[1]
    for text, is_good in [*((each, True) for each in good), *((each, False) for each in bad)]:
        assert compiler.takes(payload, json.dumps(text)) is is_good, text


@pytest.mark.parametrize(
    "schema", [{"format": "email", "maxLength": 9}, {"format": "email", "minLength": 9}]
)
async def test_lengths_that_narrow_a_format_are_followed(
    compiler: InProcessCompiler, schema: dict[str, Any]
) -> None:
    spec = GrammarSpec("json_schema", json.dumps({"type": "string", **schema}))
    payload = await compiler.compile(spec)[1]
    found = [compiler.takes(payload, f'"{text}"') for text in ("ab@cd.ef", "abcd@cd.ef")]
    assert found == ["maxLength" in schema, "minLength" in schema]


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Counts(BaseModel):
    by_colour: dict[Colour, int]
    by_size: dict[Literal["small", "large"], int]


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            Counts.model_json_schema(),
            '{"by_colour": {"red": 1, "blue": 2}, "by_size": {"large": 3}}',
            '{"by_colour": {"green": 1}, "by_size": {}}',
        ),
        ({"type": "object", "propertyNames": {"pattern": "^x[a-z]$"}}, '{"xy": []}', '{"yx": []}'),
        ({"type": "object", "propertyNames": {"const": "x"}}, '{"x": 1}', '{"y": 1}'),
    ],
)
async def test_names_of_properties(
    compiler: InProcessCompiler, schema: dict[str, Any], good: str, bad: str
) -> None:
    payload = await compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))[1]
    assert compiler.takes(payload, good)
    assert not compiler.takes(payload, bad)


async def test_formats_that_a_library_knows_are_followed(compiler: InProcessCompiler) -> None:
    schema = {"type": "string", "format": "ipv4"}
    payload = await compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))[1]
    assert compiler.takes(payload, '"127.0.0.1"')
    assert not compiler.takes(payload, '"localhost"')


async def test_clients_set_no_options_of_a_library(compiler: InProcessCompiler) -> None:
    # It would pass over what it does not know.
    schema = {"type": "object", "propertyNames": {"enum": ["a"]}, "x-guidance": {"lenient": True}}
    payload = await compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))[1]
    assert compiler.takes(payload, '{"a": 1}')
    assert not compiler.takes(payload, '{"b": 1}')
