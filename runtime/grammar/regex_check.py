"""Checks a regular expression before a library compiles it: its size, its depth, its repeats.

This is not a full parser. It reads groups, classes, escapes and quantifiers, from which the cost of
an expression follows. Other errors are found when the expression is compiled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from runtime.errors import InvalidRequest

MAX_REGEX_CHARS = 16 * 1024
MAX_REGEX_DEPTH = 64
# Most copies that nested counted repeats may make. `((a{1,100}){1,100})` makes 10,000 copies of
# `a`.
MAX_REPEATS = 4096

_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[?+]?")
_LOOKAROUND = re.compile(r"\(\?(?:<?[=!]|>)")


@dataclass
class _Group:
    """A group that is not closed yet, or the whole expression.

    Attributes:
        repeats: most copies that repeats inside the group make of an item.
        num_items: number of items in the current alternative.
        is_repeating: whether an item of the current alternative can repeat a varying number of
            times.
        is_fragile: whether an alternative consists of a single such item. If the group is repeated,
            a text can be matched in exponentially many ways.
        can_be_empty: whether the current alternative, as far as read, can match the empty text.
        matches_empty: whether one of the earlier alternatives can match the empty text.
    """

    repeats: int = 1
    num_items: int = 0
    is_repeating: bool = False
    is_fragile: bool = False
    can_be_empty: bool = True
    matches_empty: bool = False

    def add(self, item: _Item, minimum: int, maximum: int | None, name: str) -> None:
        if (maximum is None or maximum > 1) and (item.is_fragile or item.matches_empty):
            raise InvalidRequest(
                f"{name}: a repeat inside a repeat, such as (a+)+ or (a?)*, is too ambiguous.",
                param=name,
            )
        copies = max(maximum if maximum is not None else minimum, 1)
        self.repeats = max(self.repeats, item.repeats * copies)
        if self.repeats > MAX_REPEATS:
            raise InvalidRequest(
                f"{name}: counted repeats may multiply to at most {MAX_REPEATS}.", param=name
            )
        self.num_items += 1
        varies = maximum is None or maximum > max(minimum, 1)
        self.is_repeating |= varies or item.is_fragile
        self.can_be_empty &= minimum == 0 or item.matches_empty

    def end_alternative(self) -> None:
        self.is_fragile |= self.num_items == 1 and self.is_repeating
        self.matches_empty |= self.can_be_empty
        self.num_items, self.is_repeating, self.can_be_empty = 0, False, True


@dataclass(frozen=True)
class _Item:
    repeats: int = 1
    is_fragile: bool = False
    matches_empty: bool = False


def check_regex(pattern: str, name: str = "regex") -> None:
    """Refuse an expression that would take too long to compile or to follow.

    Args:
        pattern: the expression.
        name: name of the expression in the error message.

    Raises:
        InvalidRequest: the expression is too long or too deep, or its repeats multiply too much.
    """
    if len(pattern) > MAX_REGEX_CHARS:
        raise InvalidRequest(
            f"{name} may have at most {MAX_REGEX_CHARS} characters, got {len(pattern)}.", param=name
        )
    groups = [_Group()]
    index = 0
    while index < len(pattern):
        char = pattern[index]
        item = _Item()
        if char == "(":
            if _LOOKAROUND.match(pattern, index):
                raise InvalidRequest(
                    f"{name}: lookahead and lookbehind are not supported.", param=name
                )
            if len(groups) > MAX_REGEX_DEPTH:
                raise InvalidRequest(
                    f"{name} may nest at most {MAX_REGEX_DEPTH} groups.", param=name
                )
            groups.append(_Group())
            index = _skip_group_head(pattern, index)
            continue
        if char == "|":
            groups[-1].end_alternative()
            index += 1
            continue
        if char == ")" and len(groups) > 1:
            group = groups.pop()
            group.end_alternative()
            item = _Item(group.repeats, group.is_fragile, group.matches_empty)
            index += 1
        elif char in "^$":
            index += 1
            continue
        else:
            index = _skip_atom(pattern, index)
        index = _quantified(pattern, index, item, groups[-1], name)


def _quantified(pattern: str, index: int, item: _Item, group: _Group, name: str) -> int:
    quantifier = _QUANTIFIER.match(pattern, index)
    if quantifier is None or quantifier[0] == "{}":
        group.add(item, 1, 1, name)
        return index
    sign = quantifier[0][0]
    if sign in "*+?":
        minimum, maximum = (1 if sign == "+" else 0), (1 if sign == "?" else None)
    else:
        # Only nine digits are read: longer numbers exceed all limits anyway.
        low, high = (int(quantifier[n][:9] or 0) for n in (1, 3))
        minimum = low
        maximum = (high if quantifier[3] else None) if quantifier[2] else low
    group.add(item, minimum, maximum, name)
    return quantifier.end()


def _skip_group_head(pattern: str, index: int) -> int:
    head = re.compile(r"\((?:\?(?::|P?<\w+>))?").match(pattern, index)
    assert head is not None
    return head.end()


def _skip_atom(pattern: str, index: int) -> int:
    if pattern[index] == "\\":
        return index + 2
    if pattern[index] != "[":
        return index + 1
    index += 1
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index + 1
