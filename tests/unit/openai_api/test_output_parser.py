"""Streams equal whole answers: however a text is cut, the same parts come out."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openai_api.output_parser import (
    BeginCall,
    Call,
    ContentText,
    OutputParser,
    ReasoningText,
    WholeCalls,
)
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.reasoning_parsers.think_tags import ThinkTags
from openai_api.tool_parsers.hermes import HermesParser
from openai_api.tool_parsers.json_array import JsonArrayParser
from openai_api.tool_parsers.registry import TOOL_PARSERS
from openai_api.tool_parsers.tool_parser import ToolParser
from runtime.text.tag_scan import UntilTag
from tests.support.growth import assert_linear

Parts = tuple[str, str, list[tuple[str, str]]]

PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {"a": "<tool_call>"}}',
        '{"name": "g", "arguments": {}}',
        '{"name": "unknown", "arguments": {}}',
        '{"name": "f", "arguments": "{\\"b\\": 1}"}',
        "{broken",
        "<",
        "<th",
        "</",
        " ",
        "\n",
        "\n\n",
        "Hello",
        "ü😀",
        "think>",
    ]
)
TEXTS = st.lists(PIECES, max_size=12).map("".join)


def parse(pieces: list[str], *, is_open: bool = False, **options: bool) -> Parts:
    parser = OutputParser(
        ThinkTags(prompt_is_open=is_open),
        HermesParser({"f": {}, "g": {}}, max_calls=None),
        **options,
    )
    parts = [event for piece in pieces for event in parser.feed(piece)]
    events = list(WholeCalls().feed(parts + parser.finish()))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    calls = [(event.name, event.arguments) for event in events if isinstance(event, Call)]
    assert [event.index for event in events if isinstance(event, Call)] == list(range(len(calls)))
    return reasoning, content, calls


@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=20), is_open=st.booleans())
def test_any_cut_gives_the_same_parts(text: str, cuts: list[int], is_open: bool) -> None:
    places = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [
        text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)
    ]
    whole = parse([text], is_open=is_open)
    assert parse(pieces, is_open=is_open) == whole
    assert parse(list(text), is_open=is_open) == whole
    assert parse(list(text), is_open=is_open, stream_reasoning=False) == whole
    for _, arguments in whole[2]:
        assert isinstance(json.loads(arguments), dict)


@given(text=TEXTS)
def test_nothing_but_tags_and_space_is_lost(text: str) -> None:
    reasoning, content, calls = parse([text])
    letters = sum(map(str.isalnum, text))
    kept = sum(map(str.isalnum, reasoning + content + "".join(a + b for a, b in calls)))
    if not calls:
        assert letters - kept <= len("thinkthink")
    assert "</tool_call>" not in content or "<tool_call>" in text or "</tool_call>" in text


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nhm\n</think>\n\nAnswer", False, ("hm", "Answer", [])),
        ("hm\n</think>\n\nAnswer", True, ("hm", "Answer", [])),
        ("<think>hm</think>Answer", True, ("hm", "Answer", [])),
        ("  plain answer </think>", False, ("", "  plain answer </think>", [])),
        ("<think>cut off", False, ("cut off", "", [])),
        ("<think>cut </thi", False, ("cut </thi", "", [])),
        ("", True, ("", "", [])),
        (
            '<think>x</think>\nSure.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n'
            '</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>\n',
            False,
            ("x", "Sure.", [("f", '{"a": 1}'), ("g", "{}")]),
        ),
        ('<tool_call>{"name": "f", "arguments": {}}', False, ("", "", [("f", "{}")])),
        ("<tool_call>{oops</tool_call> on", False, ("", "<tool_call>{oops</tool_call> on", [])),
        (
            '<tool_call>{"name": "h", "arguments": {}}</tool_call>',
            False,
            ("", '<tool_call>{"name": "h", "arguments": {}}</tool_call>', []),
        ),
    ],
)
def test_examples(text: str, is_open: bool, expected: Parts) -> None:
    assert parse([text], is_open=is_open) == expected


def test_one_call_at_most() -> None:
    text = '<tool_call>{"name": "f"}</tool_call>' * 3
    parser = OutputParser(None, HermesParser({"f": {}}, max_calls=1))
    assert len([e for e in parser.feed(text) + parser.finish() if isinstance(e, BeginCall)]) == 1


def test_held_reasoning_comes_in_one_piece() -> None:
    parser = OutputParser(ThinkTags(prompt_is_open=False), None, stream_reasoning=False)
    events = [event for piece in "<think>a b c</think>d" for event in parser.feed(piece)]
    assert events == [ReasoningText("a b c"), ContentText("d")]


@pytest.mark.parametrize("flood", ["<", " ", "\n", "<tool_call", "<tool_call>", "</think", "{"])
def test_floods_take_linear_time(flood: str) -> None:
    def work(length: int) -> None:
        parse(list(flood * (length // len(flood))))
        parse(list("<think>" + flood * (length // len(flood))))

    assert_linear(work, 5000, 40_000)


def _hermes() -> ToolParser:
    return HermesParser({"f": {}}, max_calls=None)


def _json_array() -> ToolParser:
    return JsonArrayParser({"f": {}}, max_calls=None)


def _thoughts() -> OutputParser:
    return OutputParser(ThinkTags(prompt_is_open=True))


def _all() -> OutputParser:
    return OutputParser(ThinkTags(prompt_is_open=False), _hermes())


@pytest.mark.parametrize("piece_len", [7, None])
@pytest.mark.parametrize(
    ("make", "unit"),
    [
        (_hermes, "<tool_call></tool_call>"),
        (_hermes, '<tool_call>{"name":"f"}</tool_call>'),
        (_hermes, '<tool_call>{"name":"unknown"}</tool_call>'),
        (_hermes, " <tool_call>"),
        (_hermes, " "),
        (_json_array, '{"name":"f","parameters":{}}'),
        (_json_array, '{"a'),
        (_thoughts, " </think"),
        (_all, "<think></think><tool_call></tool_call>"),
        (_all, " "),
    ],
)
def test_many_tags_take_linear_time(
    make: Callable[[], ToolParser | OutputParser], unit: str, piece_len: int | None
) -> None:
    def work(length: int) -> None:
        text = unit * (length // len(unit))
        size = piece_len or len(text)
        parser = make()
        for begin in range(0, len(text), size):
            parser.feed(text[begin : begin + size])
        parser.finish()

    assert_linear(work, 25_000, 800_000, least_s=0.001)


def test_an_unknown_function_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    parser = HermesParser({"f": {}}, max_calls=None)
    parser.feed('<tool_call>{"name":"unknown"}</tool_call>' * 1000)
    assert len(caplog.records) == 1


def test_until_tag_can_keep_space() -> None:
    splitter = UntilTag("<x>", keep_space=True)
    assert splitter.feed("a  \n<x>b") == ("a  \n", len("a  \n<x>"))
    splitter = UntilTag("<x>")
    assert splitter.feed("a  \n<x>b") == ("a", len("a  \n<x>"))


@given(text=st.text("<x> a", max_size=30), cut=st.integers(0, 30), begin=st.integers(0, 30))
def test_until_tag_says_where_the_tag_ends(text: str, cut: int, begin: int) -> None:
    # In its second piece, of which it reads only from `begin` on, as after an earlier tag.
    first, second = text[:cut], text[cut:]
    splitter = UntilTag("<x>", keep_space=True)
    if splitter.feed(first)[1] is not None:
        return
    begin = min(begin, len(second))
    expected = (first + second[begin:]).find("<x>")
    _, end = splitter.feed(second, begin)
    if expected < 0:
        assert end is None
    else:
        assert end == expected + len("<x>") - len(first) + begin


def test_every_registered_parser_loads() -> None:
    for name in REASONING_PARSERS:
        assert REASONING_PARSERS.load(name)(prompt_is_open=False).close_tag
    for name in TOOL_PARSERS:
        assert TOOL_PARSERS.load(name)({"f": {}}, max_calls=None).markers
