"""Schemas that clients make of classes: what is only a remark keeps none from being followed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, SecretBytes

from runtime.errors import InvalidRequest
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


async def test_what_narrows_a_union_is_still_refused(compiler: InProcessCompiler) -> None:
    narrowed = {"anyOf": [{"type": "integer"}, {"type": "string"}], "maximum": 3, "x-a": 1}
    with pytest.raises(InvalidRequest, match="'maximum' beside 'anyOf'"):
        compiler.compile(GrammarSpec("json_schema", json.dumps(narrowed)))


async def test_formats_that_a_library_knows_are_followed(compiler: InProcessCompiler) -> None:
    schema = {"type": "string", "format": "ipv4"}
    payload = await compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))[1]
    assert compiler.takes(payload, '"127.0.0.1"')
    assert not compiler.takes(payload, '"localhost"')


async def test_clients_set_no_options_of_a_library(compiler: InProcessCompiler) -> None:
    # It would pass over what it does not know.
    schema = {"type": "object", "propertyNames": {"enum": ["a"]}, "x-guidance": {"lenient": True}}
    try:
        payload = await compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))[1]
    except InvalidRequest as refused:
        # The other choice is to follow it.
        if "propertyNames" not in refused.message:
            raise
        return
    assert compiler.takes(payload, '{"a": 1}')
    assert not compiler.takes(payload, '{"b": 1}')
