"""Stop strings against a search of the whole text."""

from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.text.stop_search import StopMatcher

PROPERTY = settings(max_examples=400, deadline=None, derandomize=True, database=None)


def first_match(text, stops):
    """The stop string that is complete first; of several that end together the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), end, longest
    return None


def cut(text, stops, keep):
    match = first_match(text, stops)
    if match is None:
        return text, None
    return text[: match[1] if keep else match[0]], match[2]


def feed(matcher, pieces):
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            break
    else:
        shown.append(matcher.finish())
    return shown


# Two letters make overlaps and near misses frequent.
words = st.text(alphabet="ab", min_size=1, max_size=5)


@PROPERTY
@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=8),
    st.lists(words, max_size=4),
    st.booleans(),
)
def test_any_cut_of_the_text_gives_the_same(pieces, stops, keep):
    matcher = StopMatcher(stops, keep_match=keep)
    shown = feed(matcher, pieces)
    assert ("".join(shown), matcher.matched) == cut("".join(pieces), stops, keep)


@PROPERTY
@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=8),
    st.lists(words, min_size=1, max_size=4),
)
def test_no_part_of_a_stop_string_is_shown_and_nothing_else_is_held(pieces, stops):
    matcher = StopMatcher(stops, keep_match=False)
    shown, text = "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        text += piece
        if matcher.matched is not None:
            break
        held = text[len(shown) :]
        assert text.startswith(shown)
        # Held back is exactly the longest end that a stop string may begin with.
        longest = max(
            (n for n in range(len(text) + 1) for s in stops if n < len(s) and text.endswith(s[:n])),
            default=0,
        )
        assert len(held) == longest
    assert not any(stop in shown for stop in stops)


def test_several_at_once():
    matcher = StopMatcher(["bcd", "c", ""], keep_match=False)
    assert matcher.push("abcd") == "ab"
    assert matcher.matched == "c"
    assert matcher.push("more") == ""


def test_of_two_that_end_together_the_longer_wins():
    matcher = StopMatcher(["Human:", "\nHuman:"], keep_match=False)
    assert feed(matcher, ["hi\nHu", "man: x"]) == ["hi", ""]
    assert matcher.matched == "\nHuman:"


def test_regular_expression_characters_are_plain():
    matcher = StopMatcher(["^]", "\\d", "a-z", ".*"], keep_match=False)
    assert feed(matcher, ["x5m", "a-", "y", ".", "*"]) == ["x5m", "", "a-y", "", ""]
    assert matcher.matched == ".*"


def test_long_hostile_stop_strings_cost_little():
    stops = ["a" * (1000 + n) + "b" for n in range(24)]
    matcher = StopMatcher(stops, keep_match=False)
    start = time.thread_time()
    for _ in range(5000):
        matcher.push("a")
    assert time.thread_time() - start < 2.0
