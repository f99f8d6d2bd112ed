"""Finds stop strings and patterns as text arrives, and holds back text that may become one."""

from __future__ import annotations

import re
from typing import Protocol

from runtime.ipc.messages import StreamStart
from runtime.requests.stop_regex import Match, compile_patterns


class StopMatcher:
    """Searches for several stop strings in a text that arrives in pieces.

    The match that is complete first counts, so the result does not depend on how the text was cut.
    Of two matches that end at the same character, the longer one counts, so no part of it is shown.
    """

    __slots__ = ("_first_chars", "_held", "_keep_match", "_stops", "matched")

    def __init__(self, stops: list[str], *, keep_match: bool) -> None:
        """Search for `stops`; with `keep_match` the match itself is shown too."""
        self._stops = [stop for stop in stops if stop]
        firsts = "".join(sorted({re.escape(stop[0]) for stop in self._stops}))
        self._first_chars = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._keep_match = keep_match
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add `text`; return what may be shown now.

        After a match, `matched` is set and no further text is returned.

        Args:
            text: the next part of the text.
            may_match: whether a stop string that is complete with this part counts.
        """
        if not text or self.matched is not None:
            return ""
        held_len = len(self._held)
        text = self._held + text
        match = self._first_match(text, held_len) if may_match else None
        if match is not None:
            start, end, self.matched = match
            self._held = ""
            return text[: end if self._keep_match else start]
        keep_from = self._possible_start(text)
        self._held = text[keep_from:]
        return text[:keep_from]

    def finish(self, *, may_match: bool = True) -> str:  # noqa: ARG002  # all ends were seen
        """Return the text that was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def let_go(self) -> str:
        """Return the text that is held back, because the answer is interrupted by thoughts.

        A match never includes text from before and after thoughts.
        """
        return self.finish()

    def _first_match(self, text: str, held_len: int) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # The text held back was searched before, so a match must end in the new part.
            start = text.find(stop, max(0, held_len - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[1] or (end == best[1] and start < best[0]):
                best = (start, end, stop)
        return best

    def _possible_start(self, text: str) -> int:
        # The start only moves forward as text comes, so each position is tried about once.
        for candidate in self._first_chars.finditer(text):
            start = candidate.start()
            tail_len = len(text) - start
            if any(
                len(stop) > tail_len and text.startswith(stop[:tail_len], start)
                for stop in self._stops
            ):
                return start
        return len(text)


class StopSearch(Protocol):
    """Searches for the end of a text that arrives in pieces.

    Attributes:
        matched: the stop string or pattern that was found; `None` before.
    """

    matched: str | None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add `text`; return what may be shown now. A match counts only if `may_match`."""
        ...

    def let_go(self) -> str:
        """Return the text that is held back, because the answer is interrupted by thoughts.

        A match never includes text from before and after thoughts.
        """
        ...

    def finish(self, *, may_match: bool = True) -> str:
        """Tell the search that the text is complete; return the text that was held back.

        A pattern that needs the end of the text matches now. Text from a match on is not returned,
        unless matches are part of the output.

        Args:
            may_match: whether a match at the end counts; otherwise all held-back text is returned.
        """
        ...


class RegexStopMatcher:
    """Searches for several patterns at once in a text that arrives in pieces.

    The match that is complete first counts; of several, the one that begins first. So the result
    does not depend on how the text was cut.
    """

    __slots__ = (
        "_before",
        "_held",
        "_held_len",
        "_keep_match",
        "_patterns",
        "_program",
        "_threads",
        "matched",
    )

    def __init__(self, patterns: list[str], *, keep_match: bool) -> None:
        """Search for `patterns`; with `keep_match` the match itself is shown too."""
        self._patterns = patterns
        self._program = compile_patterns(tuple(patterns))
        self._keep_match = keep_match
        # The pieces of text that are held back. They are joined only when some of it is shown.
        # Positions count from the beginning of this text.
        self._held: list[str] = []
        self._held_len = 0
        self._before = ""
        self._threads: dict[int, int] = {}
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add `text`; return what may be shown now. After a match, no text is returned.

        Args:
            text: the next part of the text.
            may_match: whether a pattern that is complete with this part counts.
        """
        if not text or self.matched is not None:
            return ""
        advance, threads, before = self._program.advance, self._threads, self._before
        idle = self._program.idle
        self._held.append(text)
        for place, char in enumerate(text, self._held_len):
            if threads or char not in idle:
                threads, match = advance(threads, place, before, char)
                if match is not None and may_match:
                    return self._found(match)
            before = char
        self._before = before
        self._held_len += len(text)
        # The threads are ordered by where their matches begin, so the first one begins first.
        start = next(iter(threads.values()), self._held_len)
        if not start:
            self._threads = threads
            return ""
        self._threads = {index: each - start for index, each in threads.items()}
        held = "".join(self._held)
        self._held = [held[start:]]
        self._held_len -= start
        return held[:start]

    def let_go(self) -> str:
        """Return the text that is held back, because the answer is interrupted by thoughts.

        A match never includes text from before and after thoughts.
        """
        held, self._held, self._held_len = "".join(self._held), [], 0
        self._threads, self._before = {}, ""
        return held

    def finish(self, *, may_match: bool = True) -> str:
        """Tell the search that the text is complete; return the text that was held back.

        A pattern that needs the end of the text matches now.
        """
        if self.matched is None and may_match:
            match = self._program.finish(self._threads, self._held_len, self._before)
            if match is not None:
                return self._found(match)
        held, self._held = "".join(self._held), []
        return held

    def _found(self, match: Match) -> str:
        self.matched = self._patterns[match.pattern]
        held, self._held = "".join(self._held), []
        return held[: match.end if self._keep_match else match.start]


class _Both:
    """Searches for stop strings first, then for patterns in the text that these let through."""

    __slots__ = ("_num_early", "_num_passed", "_patterns", "_strings", "matched")

    def __init__(self, strings: StopMatcher, patterns: RegexStopMatcher) -> None:
        self._strings = strings
        self._patterns = patterns
        # Number of characters in which matches do not count, and number of characters that the
        # search for stop strings has let through.
        self._num_early = 0
        self._num_passed = 0
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        if not may_match:
            self._num_early += len(text)
        shown = self._pass(self._strings.push(text, may_match=may_match))
        if self._patterns.matched is None and self._strings.matched is not None:
            shown += self._patterns.finish()
        self.matched = self._patterns.matched or self._strings.matched
        return shown

    def let_go(self) -> str:
        shown = self._pass(self._strings.let_go()) + self._patterns.let_go()
        self.matched = self._patterns.matched
        return shown

    def finish(self, *, may_match: bool = True) -> str:
        shown = self._pass(self._strings.finish()) + self._patterns.finish(may_match=may_match)
        self.matched = self._patterns.matched
        return shown

    def _pass(self, text: str) -> str:
        num_early = max(self._num_early - self._num_passed, 0)
        self._num_passed += len(text)
        shown = self._patterns.push(text[:num_early], may_match=False)
        return shown + self._patterns.push(text[num_early:])


def stop_search(start: StreamStart) -> StopSearch | None:
    """Return the search for a request's stop strings and patterns; `None` if it has none."""
    keep_match = start.no_stop_trim
    strings = StopMatcher(start.stop, keep_match=keep_match) if any(start.stop) else None
    if not start.stop_regex:
        return strings
    patterns = RegexStopMatcher(start.stop_regex, keep_match=keep_match)
    return patterns if strings is None else _Both(strings, patterns)
