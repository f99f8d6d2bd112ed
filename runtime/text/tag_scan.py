"""Finds tags in text that arrives in pieces of any size, in linear time."""

from __future__ import annotations

import re


def partial_tag_len(text: str, tag: str, begin: int = 0) -> int:
    """Return how many characters at the end of `text[begin:]` may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text) - begin), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class UntilTag:
    """Passes text on up to a tag, and holds back only text that may become a tag.

    Whitespace right before the tag belongs to the tag (models write it on a separate line), so it
    is held back as well and dropped when the tag follows; `keep_space` passes it on instead.

    Attributes:
        found: the tag that came last.
        space: the whitespace that was dropped before it.
    """

    def __init__(self, *tags: str, keep_space: bool = False) -> None:
        """Search for the first of `tags`, none of which begins with another."""
        self._tags = tags
        self._pattern = re.compile("|".join(map(re.escape, tags)))
        self._keep_space = keep_space
        self._space: list[str] = []
        self._tail = ""
        self.found = ""
        self.space = ""

    def feed(self, text: str, begin: int = 0) -> tuple[str, int | None]:
        """Add more text, `text[begin:]`.

        The method takes and returns positions: copying the rest at each tag would take quadratic
        time for a text full of tags.

        Returns:
            The text that may pass, and where in `text` the tag ends (`None` until it has come).
        """
        if self._tail:
            # Some text was held back before. This copy is made at most once for each text.
            text, begin, moved = self._tail + text[begin:], 0, begin - len(self._tail)
        else:
            moved = 0
        tag = self._pattern.search(text, begin)
        if tag is not None:
            passed = self._pass(text[begin : tag.start()])
            self.found, self.space = tag[0], "".join(self._space)
            if self._keep_space:
                passed += self.space
            self._space, self._tail = [], ""
            return passed, tag.end() + moved
        end = len(text) - max(partial_tag_len(text, each, begin) for each in self._tags)
        self._tail = text[end:]
        return self._pass(text[begin:end]), None

    def finish(self) -> str:
        """End the text without the tag; return the text held back."""
        rest = "".join(self._space) + self._tail
        self._space, self._tail = [], ""
        return rest

    def _pass(self, text: str) -> str:
        solid = text.rstrip()
        if not solid:
            if text:
                self._space.append(text)
            return ""
        passed = "".join(self._space) + solid
        self._space = [text[len(solid) :]]
        return passed
