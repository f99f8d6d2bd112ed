"""Expressions of texts that begin like none of some words: what no call is."""

from __future__ import annotations

from collections.abc import Mapping

# Whitespace of JSON, and what Python takes for whitespace: for classes of characters.
BLANK = r" \t\n\r"
ANY_BLANK = (
    r" \t\n\r\x0b\x0c\x1c-\x1f" + "\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
)
_SPECIAL = frozenset("\\^$.|?*+()[]{}-/")
# Characters that are looked at in one group: nesting all of them would be too deep.
_RUN = 8


def departing(words: Mapping[str, str]) -> str:
    """A regular expression of a text up to the first character that leads away from all words.

    Args:
        words: to what follows behind each, which is empty where a text must not begin so; none
            begins with another. Backslashes, with which a word could be spelled, lead nowhere.
    """
    common = _common(list(words))[:_RUN]
    ways = [f"{literal(common[:at])}[^{literal(char)}\\\\]" for at, char in enumerate(common)]
    if common:
        ways += _beyond(common, {word[len(common) :]: words[word] for word in words})
    else:
        nexts = sorted({word[0] for word in words})
        ways = [f"[^{''.join(map(literal, nexts))}\\\\]"]
        for char in nexts:
            rest = {word[1:]: words[word] for word in words if word[0] == char}
            ways += _beyond(char, rest)
    return "|".join(ways)


def _beyond(read: str, words: Mapping[str, str]) -> list[str]:
    """What may come behind a part of words, if anything."""
    behind = words[""] if "" in words else departing(words)
    return [f"{literal(read)}({behind})"] if behind else []


def _common(words: list[str]) -> str:
    """What all words begin with."""
    first, last = min(words), max(words)
    differing = (
        at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other
    )
    return first[: next(differing, min(len(first), len(last)))]


def literal(text: str) -> str:
    """A text as a regular expression of nothing else."""
    return "".join(f"\\{char}" if char in _SPECIAL else char for char in text)
