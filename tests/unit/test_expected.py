"""Errors of a body also name the accepted values, which msgspec's messages omit."""

from typing import Literal

import msgspec
import pytest

from runtime.eventloop.body_errors import InvalidBody, explain
from runtime.eventloop.json_body import decode_body

Tag = Literal["kv_cache", "weights"]


class Inner(msgspec.Struct):
    mode: Literal["abort", "retract"] = "abort"


class Body(msgspec.Struct):
    inner: Inner | None = None
    tags: list[Tag] | None = None
    # A list first: the path alone does not say which of the two was meant.
    either: list[bool | Literal["last"]] | bool | Literal["last"] = False
    named: dict[str, Inner] = {}
    level: Literal[0, 1] = 0
    renamed: Tag | None = msgspec.field(name="as", default=None)
    size: int = 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"tags": ["weights", "x"]}, "'x', expected 'kv_cache' or 'weights' - at `$.tags[1]`"),
        ({"inner": {"mode": "x"}}, "'x', expected 'abort' or 'retract' - at `$.inner.mode`"),
        (
            {"named": {"a.b": {"mode": "x"}}},
            "expected 'abort' or 'retract' - at `$.named[...].mode`",
        ),
        ({"either": "x"}, "expected true or false or 'last' - at `$.either`"),
        ({"either": ["x"]}, "expected true or false or 'last' - at `$.either[0]`"),
        ({"level": 7}, "7, expected 0 or 1 - at `$.level`"),
        ({"as": "x"}, "expected 'kv_cache' or 'weights' - at `$.as`"),
        # A value that looks like a path, and a message that needs nothing more.
        ({"as": "x - at `$.size`"}, "expected 'kv_cache' or 'weights' - at `$.as`"),
        ({"size": "x"}, "Expected `int`, got `str` - at `$.size`"),
    ],
)
def test_choices_are_listed(body, message):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(body, Body)
    assert explain(caught.value, Body).endswith(message)


class Strict(msgspec.Struct, forbid_unknown_fields=True):
    temperature: float = 1.0
    renamed: int = msgspec.field(name="top-k", default=0)


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    params: Strict | list[Strict] | None = None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"params": {"temprature": 1}},
            "contains unknown field `temprature`. Did you mean 'temperature'? - at `$.params`",
        ),
        (
            {"params": [{}, {"top_k": 1}]},
            "Object contains unknown field `top_k`. Did you mean 'top-k'? - at `$.params[1]`",
        ),
        ({"parms": 1}, "Object contains unknown field `parms`. Did you mean 'params'?"),
        ({"params": {"x": 1}}, "Object contains unknown field `x` - at `$.params`"),
        ({"params": {"a` - at `$": 1}}, "unknown field `a` - at `$` - at `$.params`"),
        ({"params": {"\n": 1}}, "unknown field `\n` - at `$.params`"),
        ({"params": {"t" * 1000: 1}}, "tttt` - at `$.params`"),
    ],
)
def test_an_unknown_name_is_told_its_neighbour(body, message):
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(body, Outer)
    assert explain(caught.value, Outer).endswith(message)


def test_the_param_of_an_error_stays_the_field():
    with pytest.raises(InvalidBody, match="expected 'kv_cache' or 'weights'") as caught:
        decode_body(b'{"tags": ["x"]}', msgspec.json.Decoder(Body))
    assert caught.value.param == "tags"
