"""Stop strings: found wherever the token borders fall, and never shown in part."""

from __future__ import annotations

import re


class StopMatcher:
    """Looks for several stop strings in a text that arrives in pieces.

    The match that is complete first wins, so the answer does not depend on how the text was cut;
    of two that end at the same character the longer one wins, so that none of it is shown.
    """

    __slots__ = ("_first_chars", "_held", "_keep_match", "_stops", "matched")

    def __init__(self, stops: list[str], *, keep_match: bool) -> None:
        """Look for `stops`; with `keep_match` the text up to and with the match is shown."""
        self._stops = [stop for stop in stops if stop]
        firsts = "".join(sorted({re.escape(stop[0]) for stop in self._stops}))
        self._first_chars = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._keep_match = keep_match
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add `text`; what may be shown now. After a match `matched` is set and nothing follows.

        Args:
            text: more of it.
            may_match: whether a stop string that is complete with it counts.
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
        """The text that was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held

    def let_go(self) -> str:
        """What is held back: the text breaks off here, and something else follows."""
        return self.finish()

    def _first_match(self, text: str, held_len: int) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            # What is held was searched before: a match must end in the new part.
            start = text.find(stop, max(0, held_len - len(stop) + 1))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or end < best[1] or (end == best[1] and start < best[0]):
                best = (start, end, stop)
        return best

    def _possible_start(self, text: str) -> int:
        # The start only moves forward as text comes, so each position is judged about once.
        for candidate in self._first_chars.finditer(text):
            start = candidate.start()
            tail_len = len(text) - start
            if any(
                len(stop) > tail_len and text.startswith(stop[:tail_len], start)
                for stop in self._stops
            ):
                return start
        return len(text)
