"""Builds regular expressions that match texts which do not begin with given words.

A grammar uses them for free text that must not begin like a call.
"""

from __future__ import annotations

from collections.abc import Mapping

# Contents of character classes: JSON's whitespace, and everything that Python treats as whitespace.
BLANK = r" \t\n\r"
ANY_BLANK = (
    r" \t\n\r\x0b\x0c\x1c-\x1f" + "\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
)
_SPECIAL = frozenset("\\^$.|?*+()[]{}-/")
# Characters that are handled in one group; a group for each character would nest too deep.
_RUN = 8


def departing(words: Mapping[str, str]) -> str:
    """Return a regex that matches a text up to the first character that departs from all `words`.

    Args:
        words: maps each word to the regex that must follow it. If the regex is empty, a text must
            not begin with the word. No word may be the beginning of another. A backslash is never
            matched, because it could begin an escape that spells a word.
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
    """Return the regex alternatives for texts that begin with `read`, the start of all `words`."""
    behind = words[""] if "" in words else departing(words)
    return [f"{literal(read)}({behind})"] if behind else []


def _common(words: list[str]) -> str:
    """Return the longest text with which all words begin."""
    first, last = min(words), max(words)
    differing = (
        at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other
    )
    return first[: next(differing, min(len(first), len(last)))]


def literal(text: str) -> str:
    """Return a regular expression that matches only `text`."""
    return "".join(f"\\{char}" if char in _SPECIAL else char for char in text)
