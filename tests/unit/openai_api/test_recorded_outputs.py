"""Every registered parser, over outputs of its family: cut anywhere, truncated, and malformed."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openai_api.call_arguments import ObjectText, arguments_object
from openai_api.json_scan import MAX_DEPTH, JsonValue
from openai_api.output_parser import (
    BeginCall,
    ContentText,
    EndCall,
    MoreArguments,
    OutputEvent,
    OutputParser,
    ReasoningText,
)
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from openai_api.tool_parsers.json_calls import JsonCalls
from openai_api.tool_parsers.registry import TOOL_PARSERS
from tests.support.growth import assert_linear
from tests.support.model_outputs import (
    BOTH,
    CALL_WRITERS,
    FUNCTIONS,
    REASONING_OUTPUTS,
    TOOL_OUTPUTS,
    Recorded,
)

# Names that are one and the same parser.
_BY_PATH = {TOOL_PARSERS.entries[name]: name for name in TOOL_OUTPUTS}
TOOL_NAMES = {name: _BY_PATH[path] for name, path in TOOL_PARSERS.entries.items()}
TOOL_KINDS = {name: TOOL_PARSERS.load(name) for name in TOOL_OUTPUTS}
CASES = [
    *((None, name, each) for name in TOOL_OUTPUTS for each in TOOL_OUTPUTS[name]),
    *((name, None, each) for name in REASONING_PARSERS for each in REASONING_OUTPUTS[name]),
    *((reasoning, tools, each) for (reasoning, tools), each in BOTH.items()),
]
IDS = [f"{reasoning}-{tools}-{at}" for at, (reasoning, tools, _) in enumerate(CASES)]
Case = tuple[str | None, str | None, Recorded]


@dataclass
class Parsed:
    """What all events say; `calls` are name, arguments, whether complete."""

    reasoning: str
    content: str
    calls: list[tuple[str, str, bool]]


def make(reasoning: str | None, tools: str | None, **options: bool) -> OutputParser:
    return OutputParser(
        REASONING_PARSERS.load(reasoning)(prompt_is_open=False) if reasoning else None,
        TOOL_PARSERS.load(tools)(FUNCTIONS, max_calls=None) if tools else None,
        **options,
    )


def joined(events: list[OutputEvent]) -> Parsed:
    parsed = Parsed("", "", [])
    open_call: list[str] | None = None
    for event in events:
        # A call is one unbroken series of events, and they are counted.
        if isinstance(event, BeginCall):
            assert open_call is None
            assert event.index == len(parsed.calls)
            open_call = [event.name]
        elif isinstance(event, MoreArguments):
            assert open_call is not None
            assert event.text
            assert event.index == len(parsed.calls)
            open_call.append(event.text)
        elif isinstance(event, EndCall):
            assert open_call is not None
            parsed.calls.append((open_call[0], "".join(open_call[1:]), event.is_complete))
            open_call = None
        else:
            assert open_call is None
            assert event.text
            if isinstance(event, ReasoningText):
                parsed.reasoning += event.text
            else:
                assert isinstance(event, ContentText)
                parsed.content += event.text
    assert open_call is None
    return parsed


def parse(case: Case, pieces: list[str], **options: bool) -> Parsed:
    parser = make(case[0], case[1], **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.finish())


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True)]


def check_calls(parsed: Parsed) -> None:
    """Complete arguments are an object, others are not, and clients that want one get one."""
    for _, arguments, is_complete in parsed.calls:
        value = JsonValue()
        is_object = value.feed(arguments) == len(arguments) and value.is_done
        assert is_object == is_complete
        if is_complete:
            assert isinstance(json.loads(arguments), dict)
        told = ObjectText()
        text = told.feed(arguments) + told.finish()
        if value.is_done or value.is_broken:
            assert isinstance(json.loads(text), dict)
        else:
            assert text == arguments


def test_every_parser_has_outputs() -> None:
    assert set(TOOL_NAMES.values()) == set(TOOL_OUTPUTS)
    assert set(REASONING_OUTPUTS) == set(REASONING_PARSERS)
    assert all(len(each) > 1 for each in TOOL_OUTPUTS.values())


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_is_read(case: Case) -> None:
    expected = case[2]
    parsed = parse(case, [expected.text])
    assert parsed.reasoning.strip() == expected.reasoning.strip()
    assert parsed.content.strip() == expected.content.strip()
    assert [(name, json.loads(given)) for name, given, _ in parsed.calls] == expected.calls
    assert all(is_complete for _, _, is_complete in parsed.calls)


@settings(max_examples=200)
@given(case=st.sampled_from(CASES), places=st.lists(st.integers(0, 1200), max_size=40))
def test_any_cut_gives_the_same(case: Case, places: list[int]) -> None:
    text = case[2].text
    whole = parse(case, [text])
    assert parse(case, cut(text, places)) == whole
    assert parse(case, cut(text, places), stream_reasoning=False) == whole


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_single_characters_and_empty_pieces(case: Case) -> None:
    text = case[2].text
    whole = parse(case, [text])
    assert parse(case, list(text)) == whole
    assert parse(case, [each for char in text for each in ("", char)]) == whole


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_truncated_anywhere(case: Case) -> None:
    """No error, and what is known is what the whole output begins with."""
    text = case[2].text
    whole = parse(case, [text])
    # Every third place, and all within the tags at both ends.
    for end in sorted({*range(0, len(text), 3), *range(min(len(text), 40))}):
        parsed = parse(case, [text[:end]])
        check_calls(parsed)
        assert len(parsed.calls) <= len(whole.calls)
        for (name, arguments, _), (whole_name, whole_arguments, _) in zip(
            parsed.calls, whole.calls, strict=False
        ):
            assert name == whole_name
            assert whole_arguments.startswith(arguments)
        if not whole.calls:
            kept = parsed.reasoning + parsed.content
            assert len(kept.strip()) <= end + len("<think>")


def _damaged(text: str, draw: random.Random) -> str:
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) + 1)
        match draw.randrange(4):
            case 0:
                text = text[:at] + text[at + draw.randint(1, 6) :]
            case 1:
                text = text[:at] + draw.choice('{}[]"\\<>,: x\n\x00é1') + text[at:]
            case 2:
                text = text[:at] + text[at : at + 30] * 2 + text[at + 30 :]
            case 3:
                text = text[at:] + text[:at]
    return text


@settings(max_examples=150)
@given(
    case=st.sampled_from(CASES),
    seed=st.integers(0, 2**32),
    places=st.lists(st.integers(0, 1200), max_size=20),
)
def test_malformed(case: Case, seed: int, places: list[int]) -> None:
    """No error, the same however cut, and calls hold JSON."""
    text = _damaged(case[2].text, random.Random(seed))
    whole = parse(case, [text])
    check_calls(whole)
    assert parse(case, cut(text, places)) == whole
    assert parse(case, list(text)) == whole


@settings(max_examples=150)
@given(case=st.sampled_from(CASES), seed=st.integers(0, 2**32))
def test_without_a_call_nothing_is_lost(case: Case, seed: int) -> None:
    """Where no function is offered, all but the marks of reasoning comes out, in its order."""
    reasoning, tools, recorded = case
    if tools is None or reasoning is not None:
        return
    text = _damaged(recorded.text, random.Random(seed))
    parser = OutputParser(None, TOOL_PARSERS.load(tools)({}, max_calls=None))
    assert joined(parser.feed(text) + parser.finish()) == Parsed("", text, [])


@pytest.mark.parametrize("name", list(TOOL_OUTPUTS))
def test_at_most_one_call(name: str) -> None:
    for recorded in TOOL_OUTPUTS[name]:
        parser = OutputParser(None, TOOL_PARSERS.load(name)(FUNCTIONS, max_calls=1))
        parsed = joined(parser.feed(recorded.text) + parser.finish())
        assert len(parsed.calls) == min(len(recorded.calls), 1)
        assert parsed.content.strip() == recorded.content


@pytest.mark.parametrize("name", list(TOOL_OUTPUTS))
def test_the_name_comes_first_and_arguments_follow(name: str) -> None:
    """Long before the call is over a client knows who is called, and JSON comes bit by bit."""
    recorded = next(each for each in TOOL_OUTPUTS[name] if each.calls)
    parser = make(None, name)
    events = [parser.feed(char) for char in recorded.text]
    begun = next(
        at for at, each in enumerate(events) if any(isinstance(e, BeginCall) for e in each)
    )
    parts = sum(isinstance(event, MoreArguments) for each in events for event in each)
    if name == "pythonic":
        # A call in Python is read when it is closed.
        assert parts == 1
    else:
        assert begun < len(recorded.text) * 0.7
        assert parts >= len(recorded.calls[0][1])


DEEP = '{"a": ' * 5000 + "1" + "}" * 5000
# What models write for arguments that is not JSON, or deeper than most clients read.
STRANGE = [
    DEEP,
    '{"a": NaN}',
    '{"a": [-Infinity, {"b": NaN}], "c": 1}',
    '{"a": True, "b": None}',
    '{"a": undefined}',
    '{"a": 1, }',
    '{"a": [1,, 2]}',
    "{'a': 1}",
    '{a: {"b": "}"}}',
    '{"a" 1}',
    '{"a": "two\nlines", "b": "}"}',
    '{"a": "C:\\dir", "b": "\\uZ"}',
    '{"a": .5, "b": 1e}',
    '{"a": tru}',
    '{"a": 1 "b": 2}',
    '{"a": {"b": 1, "c": "\x00"}}',
]
WITH_JSON = [name for name, kind in TOOL_KINDS.items() if issubclass(kind, JsonCalls)]


@pytest.mark.parametrize("given", STRANGE, ids=range(len(STRANGE)))
@pytest.mark.parametrize("name", WITH_JSON)
def test_arguments_are_what_the_model_wrote(name: str, given: str) -> None:
    mark = {"mark": 0}
    text = CALL_WRITERS[name]([("now", mark), ("now", {})]).replace(json.dumps(mark), given)
    whole = parse((None, name, Recorded("")), [text])
    calls = [("now", given, given is DEEP), ("now", "{}", True)]
    assert (whole.calls, whole.content.strip()) == (calls, "")
    case = (None, name, Recorded(""))
    if given is not DEEP:
        assert parse(case, list(text)) == whole
    assert parse(case, cut(text, [*range(0, len(text), 7)])) == whole


@pytest.mark.parametrize("name", WITH_JSON)
def test_brackets_that_never_close_end_with_the_call(name: str) -> None:
    mark = {"mark": 0}
    given = '{"a": [1, {"b": 2 '
    text = CALL_WRITERS[name]([("now", mark)]).replace(json.dumps(mark), given + "x")
    parsed = parse((None, name, Recorded("")), [text])
    ((_, arguments, is_complete),) = parsed.calls
    assert arguments.startswith(given)
    assert not is_complete
    assert parse((None, name, Recorded("")), list(text)) == parsed


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ('{"a": NaN}', {"a": "NaN"}),
        ('{"a": [1, NaN]}', {"a": [1, "NaN"]}),
        ('{"a": NaN, "b": 2}', {"a": 'NaN, "b": 2'}),
        ('{"a": "two\nlines"}', {"a": 'two\nlines"'}),
        ('{"a": "C:\\dir"}', {"a": 'C:\\dir"'}),
        ('{"a": "\\u00x"}', {"a": '\x00x"'}),
        ("{'a': 1}", {"'a': 1": None}),
        ('{"a" 1}', {"a": "1"}),
        ('{"a": 1 "b": 2}', {"a": 1, '"b": 2': None}),
        ('{"a": tru}', {"a": True, "": None}),
        ('{"a": -x}', {"a": -0, "x": None}),
        ('{"a\n": 1}', {'a\n": 1': None}),
        ('{"a": [1', {"a": [1]}),
    ],
)
def test_clients_that_want_an_object_get_one(given: str, told: dict[str, Any]) -> None:
    assert arguments_object(given) == told


def test_objects_are_as_deep_as_clients_read() -> None:
    found: Any = arguments_object(DEEP)
    for _ in range(MAX_DEPTH):
        assert list(found) == ["a"]
        found = found["a"]
    assert found == '{"a": ' * (5000 - MAX_DEPTH) + "1" + "}" * (5000 - MAX_DEPTH)


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "minimax-m2"])
def test_arguments_in_tags_are_whole_where_a_call_ends_early(name: str) -> None:
    text = CALL_WRITERS[name]([("write_file", {"path": "a", "mode": 7})])
    at = text.index("mode")
    # Something else in the place of the second argument's tag.
    at = text.rindex("<", 0, at)
    parsed = parse((None, name, Recorded("")), [f"{text[:at]}Well. {text[at:]}"])
    assert [(json.loads(given), done) for _, given, done in parsed.calls] == [({"path": "a"}, True)]
    assert "Well." in parsed.content


FLOODS = ("<", " ", "{", "[", '"', "\\", "(", '{"name": "now"}', "</think>")


def floods(name: str) -> list[str]:
    """What to repeat: single marks, the parser's own, its calls, their beginnings, broken ones."""
    call = TOOL_OUTPUTS[name][0].text
    mark = {"mark": 0}
    broken = CALL_WRITERS[name]([("now", mark)]).replace(json.dumps(mark), '{"a": [NaN}]"')
    return [*FLOODS, *TOOL_PARSERS.load(name).markers, call, call[: len(call) // 2], broken]


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("name", list(TOOL_OUTPUTS))
def test_floods_take_linear_time(name: str, is_cut: bool) -> None:
    def work(length: int) -> None:
        for flood in floods(name):
            text = flood * (length // len(flood) + 1)
            parser = make(None, name)
            for piece in text if is_cut else [text]:
                parser.feed(piece)
            parser.finish()

    assert_linear(work, 600, 4800)


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "minimax-m2"])
def test_a_schema_is_looked_through_once(name: str) -> None:
    values = [str(number) for number in range(100_000)]
    functions = {"now": {"properties": {"a": {"enum": values}}}}

    def work(num_calls: int) -> None:
        parser = TOOL_PARSERS.load(name)(functions, max_calls=None)
        parser.feed(CALL_WRITERS[name]([("now", {"a": "1"})] * num_calls))

    started = time.thread_time()
    work(1)
    one_s = time.thread_time() - started
    started = time.thread_time()
    work(100)
    assert time.thread_time() - started < 20 * one_s
