"""Matches regular expressions one character at a time, in time linear in the text's length.

A set of patterns becomes one automaton without backtracking (Thompson's construction). While a text
grows, the automaton also reports where an incomplete match begins, because a stream must not show
the text from there on. The well-known linear-time libraries do not report that.

The syntax is Python's without the features that need backtracking: back-references, look-around,
atomic groups and possessive repeats. `$` matches at the end of the output.

Source: Russ Cox, "Regular Expression Matching: the Virtual Machine Approach".
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from re import _constants as sre  # type: ignore[attr-defined]  # what `re` itself parses with
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

MAX_PATTERNS = 32
MAX_PATTERN_BYTES = 256
# The most states of all patterns of a request. Each character visits every state at most once.
MAX_STATES = 512

_START = 0
_NO_PATTERN = -1
_NO_MOVES: tuple[int, ...] = ()
_MAX_CACHED_CHARS = 512
_PROGRAMS = 256


class InvalidPattern(ValueError):
    """A pattern is not supported, is too large, or matches the empty text."""


class Match(NamedTuple):
    """`text[start:end]` matches the pattern numbered `pattern`."""

    start: int
    end: int
    pattern: int


class _Chars:
    """A set of characters, such as `[a-z]`, as the pattern's parser gives it."""

    def __init__(self, items: list[tuple[Any, Any]], flags: int) -> None:
        self._items = items
        self._negated = bool(self._items) and self._items[0][0] is sre.NEGATE
        if self._negated:
            del self._items[0]
        self._ascii = bool(flags & re.ASCII)
        self._ignores_case = bool(flags & re.IGNORECASE)

    def holds(self, char: str) -> bool:
        spellings = {char, char.lower(), char.upper()} if self._ignores_case else (char,)
        found = any(self._has(each) for each in spellings if len(each) == 1)
        return found != self._negated

    def _has(self, char: str) -> bool:
        code = ord(char)
        for kind, value in self._items:
            if kind is sre.LITERAL:
                found = code == value
            elif kind is sre.RANGE:
                found = value[0] <= code <= value[1]
            elif kind is sre.CATEGORY:
                found = self._in_category(value, char)
            else:
                raise InvalidPattern(f"{kind} is not supported")
            if found:
                return True
        return False

    def _in_category(self, category: Any, char: str) -> bool:
        name = str(category).removeprefix("CATEGORY_")
        kind = name.removeprefix("NOT_")
        if self._ascii and not char.isascii():
            found = False
        elif kind == "DIGIT":
            found = char.isdecimal()
        elif kind == "SPACE":
            found = char.isspace()
        else:
            found = _is_word(char)
        return found != name.startswith("NOT_")


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


class _Node(NamedTuple):
    """A state of the automaton.

    With `chars` it reads one of these characters and goes to `targets`. Without `chars` it goes
    there without reading, if its `condition` (such as a word boundary) holds. With `pattern` it
    accepts that pattern.
    """

    chars: _Chars | None
    condition: str
    targets: list[int]
    pattern: int


class _Builder:
    """Adds the states of patterns, from the last item of a pattern to the first."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []
        # Work is bounded besides states, because repeats of an empty item add no states.
        self._steps = 0

    def add(
        self,
        targets: Sequence[int] = (),
        *,
        chars: _Chars | None = None,
        condition: str = "",
        pattern: int = _NO_PATTERN,
    ) -> int:
        if len(self.nodes) >= MAX_STATES:
            raise InvalidPattern(f"the patterns need more than {MAX_STATES} states")
        self.nodes.append(_Node(chars, condition, list(targets), pattern))
        return len(self.nodes) - 1

    def sequence(self, items: Any, flags: int, after: int) -> int:
        for item in reversed(list(items)):
            after = self._item(item, flags, after)
        return after

    def _item(self, item: tuple[Any, Any], flags: int, after: int) -> int:
        self._steps += 1
        if self._steps > 8 * MAX_STATES:
            raise InvalidPattern("the patterns repeat too much")
        kind, value = item
        if kind in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY):
            return self.add([after], chars=_Chars(_set(item, flags), flags))
        if kind is sre.BRANCH:
            return self.add([self.sequence(each, flags, after) for each in value[1]])
        if kind is sre.SUBPATTERN:
            _, added, removed, inner = value
            return self.sequence(inner, (flags | added) & ~removed, after)
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, inner = value
            return self._repeat(least, most, inner, flags, after)
        if kind is sre.AT:
            return self.add([after], condition=_condition(value, flags))
        raise InvalidPattern("back-references, look-around and atomic groups are not supported")

    def _repeat(self, least: int, most: Any, inner: Any, flags: int, after: int) -> int:
        if most is sre.MAXREPEAT:
            loop = self.add()
            self.nodes[loop].targets.extend((self.sequence(inner, flags, loop), after))
            after = loop
        else:
            end = after
            for _ in range(most - least):
                self._steps += 1
                after = self.add([self.sequence(inner, flags, after), end])
        for _ in range(least):
            after = self.sequence(inner, flags, after)
            self._steps += 1
            if self._steps > 8 * MAX_STATES:
                raise InvalidPattern("the patterns repeat too much")
        return after


def _set(item: tuple[Any, Any], flags: int) -> list[tuple[Any, Any]]:
    kind, value = item
    if kind is sre.IN:
        return list(value)
    if kind is sre.LITERAL:
        return [item]
    if kind is sre.NOT_LITERAL:
        return [(sre.NEGATE, None), (sre.LITERAL, value)]
    return [(sre.NEGATE, None)] if flags & re.DOTALL else _set((sre.NOT_LITERAL, 10), flags)


def _condition(place: Any, flags: int) -> str:
    name = str(place).removeprefix("AT_")
    if name in ("BEGINNING", "END") and flags & re.MULTILINE:
        return f"{name}_LINE"
    return name.removesuffix("_STRING")


def _is_fulfilled(condition: str, before: str, after: str) -> bool:
    """Whether `condition` holds between the characters `before` and `after`.

    A character is `""` where the text begins or ends.
    """
    if condition == "BEGINNING":
        return not before
    if condition == "END":
        return not after
    if condition == "BEGINNING_LINE":
        return before in ("", "\n")
    if condition == "END_LINE":
        return after in ("", "\n")
    is_boundary = (before != "" and _is_word(before)) != (after != "" and _is_word(after))
    return is_boundary == (condition == "BOUNDARY")


class Program:
    """An automaton for a set of patterns. It stores no text, so requests may share it."""

    def __init__(self, nodes: list[_Node]) -> None:
        """Prepare the tables of `nodes`; only `compile_patterns` calls this."""
        self._nodes = nodes
        reached = [list(self._closure([index])) for index in range(len(nodes))]
        self._readers = [[n for n in each if nodes[n].chars is not None] for each in reached]
        self._conditions = [[n for n in each if nodes[n].condition] for each in reached]
        self._patterns = [
            next((nodes[n].pattern for n in each if nodes[n].pattern != _NO_PATTERN), _NO_PATTERN)
            for each in reached
        ]
        self._moves: list[dict[str, tuple[int, ...]]] = [{} for _ in nodes]
        # Characters that cannot begin a match. Most of a text consists of such characters, so the
        # search skips runs of them.
        self.idle: set[str] = set()

    def _closure(self, roots: list[int], context: tuple[str, str] | None = None) -> Iterator[int]:
        # Yields all states that are reached without reading. Without `context`, the characters
        # around the position, states with a condition are not passed.
        todo, seen = roots[::-1], set(roots)
        while todo:
            index = todo.pop()
            yield index
            node = self._nodes[index]
            if node.chars is not None:
                continue
            if node.condition and not (context and _is_fulfilled(node.condition, *context)):
                continue
            for target in reversed(node.targets):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)

    def matches_nothing(self) -> bool:
        """Whether the empty text would match if every condition held."""
        todo, seen = [_START], {_START}
        while todo:
            node = self._nodes[todo.pop()]
            if node.pattern != _NO_PATTERN:
                return True
            if node.chars is None:
                fresh = [target for target in node.targets if target not in seen]
                seen.update(fresh)
                todo += fresh
        return False

    def advance(
        self, threads: dict[int, int], place: int, before: str, char: str
    ) -> tuple[dict[int, int], Match | None]:
        """Read one character.

        Args:
            threads: the states before the character. The value is the index at which the earliest
                match that leads to the state begins; entries are ordered by it.
            place: index of `char` in the text.
            before: the character before it; `""` at the beginning.
            char: the character to read.

        Returns:
            The states after the character, in the form of `threads`; and the match that ends with
            the character or right before it, if there is one. Of several matches, the one that
            begins first is returned.
        """
        after: dict[int, int] = {}
        for index, start in chain(threads.items(), ((_START, place),)):
            if not self._conditions[index]:
                targets = self._moves[index].get(char)
                if targets is None:
                    targets = self._move(index, char)
                for target in targets:
                    after.setdefault(target, start)
                continue
            for each in self._closure([index], (before, char)):
                if self._nodes[each].pattern != _NO_PATTERN:
                    return {}, Match(start, place, self._nodes[each].pattern)
                for target in self._read(each, char):
                    after.setdefault(target, start)
        if not after and not threads and not self._conditions[_START]:
            if len(self.idle) >= _MAX_CACHED_CHARS:
                self.idle.clear()
            self.idle.add(char)
        for target, start in after.items():
            if self._patterns[target] != _NO_PATTERN:
                return {}, Match(start, place + 1, self._patterns[target])
        return after, None

    def finish(self, threads: dict[int, int], place: int, before: str) -> Match | None:
        """Return the match that is complete because the text ends at index `place`.

        Returns `None` if there is none. The arguments are those of `advance`.
        """
        for index, start in threads.items():
            for each in self._closure([index], (before, "")):
                if self._nodes[each].pattern != _NO_PATTERN:
                    return Match(start, place, self._nodes[each].pattern)
        return None

    def _read(self, index: int, char: str) -> Sequence[int]:
        chars = self._nodes[index].chars
        return self._nodes[index].targets if chars is not None and chars.holds(char) else _NO_MOVES

    def _move(self, index: int, char: str) -> tuple[int, ...]:
        known = self._moves[index]
        if len(known) >= _MAX_CACHED_CHARS:
            known.clear()
        known[char] = tuple(
            target for each in self._readers[index] for target in self._read(each, char)
        )
        return known[char]


@lru_cache(_PROGRAMS)
def compile_patterns(patterns: tuple[str, ...]) -> Program:
    """Build the automaton that searches for all of `patterns` at once.

    Raises:
        InvalidPattern: there are too many patterns, or one is too long, invalid, or matches the
            empty text.
    """
    if len(patterns) > MAX_PATTERNS:
        raise InvalidPattern(f"at most {MAX_PATTERNS} patterns are allowed, got {len(patterns)}")
    for pattern in patterns:
        _compile([pattern])
    return _compile(patterns)


def _compile(patterns: Sequence[str]) -> Program:
    builder = _Builder()
    start = builder.add()
    for number, pattern in enumerate(patterns):
        if len(pattern.encode(errors="surrogatepass")) > MAX_PATTERN_BYTES:
            raise InvalidPattern(f"a pattern may have at most {MAX_PATTERN_BYTES} bytes")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                parsed = _parser.parse(pattern)
            accepting = builder.add(pattern=number)
            first = builder.sequence(parsed, parsed.state.flags, accepting)
        except (re.error, OverflowError) as error:
            raise InvalidPattern(f"{pattern!r} is not a regular expression: {error}") from None
        except RecursionError:
            raise InvalidPattern("a pattern is nested too deeply") from None
        builder.nodes[start].targets.append(first)
    program = Program(builder.nodes)
    if program.matches_nothing():
        raise InvalidPattern(
            f"{patterns[0]!r} matches the empty text: it would end every output at once"
        )
    return program
