"""Large bodies decode in pieces to the same values; excessive ones are refused by a count."""

import json
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.eventloop import json_body
from runtime.eventloop.body_errors import InvalidBody
from runtime.eventloop.json_body import decode_large, let_go, read_json


class Part(msgspec.Struct):
    text: str | None = None
    more: list["Part"] | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None


class Body(msgspec.Struct):
    messages: list[Message] | None = None
    items: list[dict[str, object]] | None = None
    tables: list[dict[str, list[int]]] | None = None
    text: str | list[str] | None = None
    ids: list[int | list[int]] | None = None
    rows: list[list[float | list[float]]] | None = None
    params: list[dict[str, float]] | None = None
    renamed: list[int] | None = msgspec.field(default=None, name="other-name")
    one: dict[str, float] | None = None


DECODER = msgspec.json.Decoder(Body)


# What takes megabytes otherwise: pieces of a few bytes.
decode_small = partial(decode_large, piece_bytes=16, window=48)


PARTS = st.recursive(
    st.lists(st.fixed_dictionaries({"text": st.text(max_size=9)}), max_size=4),
    lambda inner: st.lists(st.fixed_dictionaries({"more": inner}), max_size=2),
    max_leaves=4,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "text": st.one_of(st.text(max_size=9), st.lists(st.text(max_size=9))),
        "ids": st.one_of(
            st.lists(st.integers(0, 99999)), st.lists(st.lists(st.integers(0, 99999)))
        ),
        "rows": st.lists(
            st.one_of(
                st.lists(st.floats(0, 1), min_size=1),
                st.lists(st.lists(st.floats(0, 1)), min_size=1),
            )
        ),
        "params": st.lists(st.dictionaries(st.text(max_size=5), st.floats(0, 1), max_size=3)),
        "other-name": st.lists(st.integers(0, 9)),
        "one": st.dictionaries(st.text(max_size=5), st.floats(0, 1), max_size=3),
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.text(max_size=3)},
                optional={
                    "content": st.one_of(
                        st.text(max_size=9), PARTS, st.lists(st.integers(0, 99999))
                    ),
                    "unknown": st.lists(st.text(max_size=9)),
                },
            ),
            max_size=4,
        ),
        "items": st.lists(
            st.dictionaries(
                st.text(max_size=3),
                st.one_of(st.integers(0, 99999), PARTS, st.lists(st.text())),
                max_size=3,
            ),
            max_size=3,
        ),
        "tables": st.lists(
            st.dictionaries(
                st.text(max_size=3),
                st.lists(st.one_of(st.integers(0, 99999), st.sampled_from([1.5]))),
                max_size=3,
            ),
            max_size=3,
        ),
        "unknown": st.lists(st.one_of(st.none(), st.text(max_size=3), st.lists(st.booleans()))),
    },
)


def test_in_pieces_it_says_the_same():
    @given(BODIES, st.sampled_from([None, 1]), st.booleans())
    def check(content, indent, ensure_ascii):
        body = json.dumps(content, indent=indent, ensure_ascii=ensure_ascii).encode()
        try:
            expected = DECODER.decode(body)
        except msgspec.ValidationError:
            with pytest.raises(InvalidBody):
                decode_small(body, DECODER)
            return
        assert decode_small(body, DECODER) == expected
        assert decode_small(bytearray(body), DECODER) == expected

    check()


def test_what_is_no_json_is_refused():
    @given(BODIES, st.data())
    def check(content, data):
        body = bytearray(json.dumps(content).encode() + b" " * 16)
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + 1] = data.draw(st.binary(max_size=2))
        try:
            expected = DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            with pytest.raises(InvalidBody):
                decode_small(body, DECODER)
            return
        try:
            assert decode_small(body, DECODER) == expected
        except InvalidBody as error:
            # A key that appears twice is refused where the decoder takes the last.
            assert "twice" in error.message or "UTF-8" in error.message  # noqa: PT017

    check()


@pytest.mark.parametrize("end", [",]", ", ]", ",,1]"])
@pytest.mark.parametrize("item", ["1", "[1, 2, 3, 4, 5, 6, 7, 8]"])
def test_a_comma_with_nothing_behind_it_is_no_json(item, end):
    for count in range(1, 20):
        body = '{"ids": [' + ", ".join([item] * count)
        assert decode_small(f"{body}]}}".encode(), DECODER)
        with pytest.raises(InvalidBody):
            decode_small(f"{body}{end}}}".encode(), DECODER)


def test_a_comma_with_nothing_ahead_of_it_is_no_json():
    for begin in (",", " , ", "1,,"):
        body = '{"ids": [' + begin + "[1, 2, 3, 4, 5, 6, 7, 8]]}"
        with pytest.raises(InvalidBody):
            decode_small(body.encode(), DECODER)


def test_a_wrong_item_is_named_by_its_field():
    body = json.dumps({"ids": [*range(200_000), "x"]}).encode()
    with pytest.raises(InvalidBody, match=r"got `str` - at `\$\.ids\[\.\.\.\]`") as raised:
        decode_large(body, DECODER)
    assert raised.value.param == "ids"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"ids":[' + b"1," * 9_000_000 + b"1]}", "at most 8388608 numbers"),
        (b'{"unknown":[' + b"[]," * 5_000_000 + b"1]}", "4194304 strings, lists"),
        (b'{"ids":[' + b"1," * 2_000_000 + b"1]}", "at most 1048576 items"),
        (b'{"ids":[' + b"[1]," * 300_000 + b"[1]]}", "at most 262144 items"),
        (b'{"one":{"a":[' + b"1," * 1_100_000 + b"1]}}", "one is too large"),
        (b'{"text":"' + "ä".encode() * 5_000_000 + b'"}', "at most 8388608 bytes"),
        (b"{" + b",".join(b'"%d":1' % n for n in range(40_000)) + b"}", "at most 1024 fields"),
        (b'{"ids":[' + b" " * 1_000_000 + b"1]}", "malformed"),
        (b"[" * 1_000_000, "malformed"),
    ],
    ids=["numbers", "parts", "items", "lists", "undivided", "text", "fields", "blanks", "brackets"],
)
def test_too_much_is_refused(body, says):
    with pytest.raises(InvalidBody, match=says):
        decode_large(body, DECODER)


async def test_any_size():
    for count in (1, 50_000, 400_000):
        body = json.dumps({"ids": list(range(count))}).encode()
        assert (await read_json(body, DECODER)).ids == list(range(count))


async def test_lists_that_are_let_go_stay_as_they_are_elsewhere():
    lists = [list(range(8)) for _ in range(8)]
    first = lists[0]
    let_go(lists, at_once=10, after_s=0.0)
    # The pool is done with what was put into it before.
    await json_body.work_out(10**9, int)
    assert first == list(range(8))
    assert len(lists) == 8
