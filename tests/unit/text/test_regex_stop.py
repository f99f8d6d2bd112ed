"""Stop patterns against Python's own search of the whole text."""

from __future__ import annotations

import re
import time
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.ipc.messages import StreamStart
from runtime.requests.stop_regex import MAX_STATES, InvalidPattern, compile_patterns
from runtime.text.stop_search import RegexStopMatcher, stop_search
from tests.support.growth import assert_linear

PROPERTY = settings(max_examples=300, deadline=None, derandomize=True, database=None)
PATTERNS = [
    "ab",
    "a+b",
    "a*b",
    "(a|b)c",
    "a.c",
    "(?s:a.c)",
    "a[^b]c",
    "[a-b]{2,3}c",
    "a{2}",
    "(?:ab|a)(?:c|bc)",
    r"\bab\b",
    r"b\b",
    r"\Bb",
    "^b",
    "(?m:^b)",
    "(?m)c$",
    "c$",
    r"\n\n",
    "(?i)AB",
    "(?i)[^a]c",
    r"a\sb",
    r"\w\W",
    "a??b",
    "((a|b)*)c",
    "a.*c",
]
texts = st.text(alphabet="abcA \n", max_size=14)


def expected(text: str, patterns: list[str]) -> tuple[int, int, str] | None:
    """The match that is complete first; of those the one that begins first."""
    for end in range(len(text) + 1):
        rest = len(text) - end
        for start in range(end):
            for pattern in patterns:
                if _ending_before(pattern, rest).match(text, start):
                    return start, end, pattern
    return None


@cache
def _ending_before(pattern: str, rest: int) -> re.Pattern[str]:
    # The look-ahead leaves exactly the rest: so the match ends where it is asked to.
    return re.compile(f"(?:{_local(pattern)})(?=(?s:.{{{rest}}})\\Z)")


def _local(pattern: str) -> str:
    # Flags for the whole pattern stand at its beginning; `$` is the end of the output for us.
    if (found := re.match(r"\(\?([im])\)", pattern)) is not None:
        return f"(?{found[1]}:{pattern[found.end() :]})"
    return r"c\Z" if pattern == "c$" else pattern


def feed(matcher: RegexStopMatcher, pieces: list[str]) -> list[str]:
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            return shown
    return [*shown, matcher.finish()]


@PROPERTY
@given(
    st.lists(texts, max_size=5),
    st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3, unique=True),
    st.booleans(),
)
def test_any_cut_of_the_text_gives_what_a_search_of_the_whole_finds(pieces, patterns, keep):
    matcher = RegexStopMatcher(patterns, keep_match=keep)
    shown, text = feed(matcher, pieces), "".join(pieces)
    match = expected(text, patterns)
    if match is None:
        assert (matcher.matched, "".join(shown)) == (None, text)
    else:
        start, end, _ = match
        assert "".join(shown) == text[: end if keep else start]
        assert matcher.matched is not None
        assert expected(text, [matcher.matched])[:2] == (start, end)


@PROPERTY
@given(st.lists(texts, max_size=6), st.sampled_from(PATTERNS))
def test_what_is_shown_is_never_taken_back(pieces, pattern):
    matcher = RegexStopMatcher([pattern], keep_match=False)
    seen = ""
    for piece in pieces:
        seen += matcher.push(piece)
        if matcher.matched is not None:
            break
    else:
        seen += matcher.finish()
    whole = RegexStopMatcher([pattern], keep_match=False)
    assert "".join(feed(whole, ["".join(pieces)])) == seen


def test_only_what_may_become_a_match_is_held_back():
    matcher = RegexStopMatcher([r"\n\nQ\d+:"], keep_match=False)
    assert matcher.push("one\n") == "one"
    assert matcher.push("two\n\nQ1") == "\ntwo"
    assert matcher.push("2") == ""
    assert matcher.push("3 ") == "\n\nQ123 "
    assert matcher.push("\n\nQ7:more") == ""
    assert matcher.matched == r"\n\nQ\d+:"


def test_strings_and_patterns_together():
    def search(stop=("END",), stop_regex=(r"\d\d",)):
        return stop_search(
            StreamStart(1, True, list(stop), True, True, False, 1, b"", list(stop_regex))
        )

    both = search()
    assert both.push("a 1E") == "a "
    assert both.push("ND 22") == "1"
    assert both.matched == "END"
    both = search()
    assert both.push("a 12 END") == "a "
    assert both.matched == r"\d\d"
    assert search(stop_regex=[]).push("12") == "12"
    assert search(stop=[]).push("12") == ""
    assert search(stop=[], stop_regex=[]) is None


@pytest.mark.parametrize(
    "pattern",
    [
        *("(", "a**", "[b-a]", r"(a)\1", "(?=a)b", "(?<!a)b", "(?>a)b", "a*+b"),
        *("", "a*", "^", r"\b|a"),
        *("a" * 257, "(" * 128 + "a" + ")" * 128, "a{600}", "(a{60}){60}", "a{99999999999999}"),
        *("(?:){9999999}b", "((?:){9999}){9999}b"),
    ],
)
def test_what_cannot_be_searched_for_is_refused_at_once(pattern):
    started_at = time.thread_time()
    with pytest.raises(InvalidPattern):
        compile_patterns((pattern,))
    assert time.thread_time() - started_at < 1


def test_all_patterns_together_are_bounded():
    one = "a{100}b"
    compile_patterns((one,))
    with pytest.raises(InvalidPattern, match=str(MAX_STATES)):
        compile_patterns(tuple(f"{one}{n}" for n in range(6)))
    with pytest.raises(InvalidPattern, match="32"):
        compile_patterns(tuple(f"a{n}" for n in range(33)))


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*)*b", "a?" * 24 + "a" * 24 + "b"]
)
def test_patterns_that_trap_backtracking_take_linear_time(pattern):
    def work(length: int) -> None:
        matcher = RegexStopMatcher([pattern], keep_match=False)
        for _ in range(length):
            matcher.push("a")

    assert_linear(work, 2000, 16_000)
