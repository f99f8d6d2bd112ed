"""A key that occurs twice in one object is refused in every spelling."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.eventloop.body_errors import InvalidBody
from runtime.eventloop.json_body import decode_body
from runtime.service.generate_request import GenerateBody

ANY: msgspec.json.Decoder[Any] = msgspec.json.Decoder()
# Few, and such that a look at quotes and colons alone could take one for another.
KEYS = st.sampled_from(["a", "b", "", ":", '"', "\\", '":', "ä", " a"])
SPACES = st.sampled_from(["", " ", "\n\t "])


class Pairs(list[tuple[str, Any]]):
    """An object, its keys as often as they are written."""


VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | KEYS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(st.tuples(KEYS, inner), max_size=4).map(Pairs)
    ),
    max_leaves=12,
)


def has_twice(value: Any) -> bool:
    if isinstance(value, Pairs):
        keys = [key for key, _ in value]
        return len(set(keys)) < len(keys) or any(has_twice(inner) for _, inner in value)
    return isinstance(value, list) and any(has_twice(inner) for inner in value)


def write(value: Any, space: str, ascii_only: bool) -> str:
    def pair(key: str, inner: Any) -> str:
        written = json.dumps(key, ensure_ascii=ascii_only)
        return f"{space}{written}{space}:{space}{write(inner, space, ascii_only)}"

    if isinstance(value, Pairs):
        return "{" + ",".join(pair(*each) for each in value) + space + "}"
    if isinstance(value, list):
        return "[" + ",".join(write(inner, space, ascii_only) for inner in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(VALUES, SPACES, st.booleans())
def test_a_key_may_appear_once_in_an_object(value: Any, space: str, ascii_only: bool) -> None:
    body = write(value, space, ascii_only).encode()
    if has_twice(value):
        with pytest.raises(InvalidBody, match="appears twice in one JSON object"):
            decode_body(body, ANY)
    else:
        assert decode_body(body, ANY) == json.loads(body)


@pytest.mark.parametrize("twice", [False, True])
def test_a_prompt_of_token_ids(twice: bool) -> None:
    more = ', "stream" : false' if twice else ""
    body = f'{{"input_ids": {list(range(500))}, "stream": true{more}}}'.encode()
    if twice:
        with pytest.raises(InvalidBody, match="'stream' appears twice"):
            decode_body(body, ANY)
    else:
        assert decode_body(body, ANY)["stream"] is True


@pytest.mark.parametrize("body", [b'{"zz": "\xff\xfe"}', b'{"z\xff": 1}', b'{"zz": "\xc0\xaf"}'])
def test_what_is_no_utf8_is_refused_where_nobody_reads_it_too(body: bytes) -> None:
    with pytest.raises(InvalidBody, match="not valid UTF-8"):
        decode_body(body, msgspec.json.Decoder(GenerateBody))


@pytest.mark.parametrize("num_strings", [3, 2000])
def test_however_many_strings_there_are(num_strings: int) -> None:
    strings = json.dumps(["x"] * num_strings)
    assert decode_body(f'{{"a": {strings}, "b": 1}}'.encode(), ANY)["b"] == 1
    with pytest.raises(InvalidBody, match="'a' appears twice"):
        decode_body(f'{{"a": {strings}, "a": 1}}'.encode(), ANY)


def test_the_same_key_in_two_objects_is_fine() -> None:
    body = b'{"messages": [{"role": "user"}, {"role": "assistant"}]}'
    assert len(decode_body(body, ANY)["messages"]) == 2
