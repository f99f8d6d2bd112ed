"""Finds tags in a text that arrives in pieces of any size, in time linear in its length."""

from __future__ import annotations

import re


def partial_tag_len(text: str, tag: str, begin: int = 0) -> int:
    """Return how many characters at the end of `text[begin:]` may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text) - begin), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class UntilTag:
    """Passes text on up to a tag, and holds back only what may become a tag.

    Whitespace right before a tag belongs to the tag, because models write tags on lines of their
    own. So such whitespace is held back as well, and dropped if a tag follows. With `keep_space` it
    is passed on.

    Attributes:
        found: the tag that was found last.
        space: the whitespace that was dropped before that tag.
    """

    def __init__(self, *tags: str, keep_space: bool = False) -> None:
        """Search for `tags`, none of which may be the beginning of another."""
        self._tags = tags
        self._pattern = re.compile("|".join(map(re.escape, tags)))
        self._keep_space = keep_space
        self._space: list[str] = []
        self._tail = ""
        self.found = ""
        self.space = ""

    def feed(self, text: str, begin: int = 0) -> tuple[str, int | None]:
        """Add more text: `text[begin:]`.

        Positions are passed instead of rests of the text, because copying the rest at each tag
        would take quadratic time for a text full of tags.

        Returns:
            The text that may pass, and the position in `text` where the tag ends; `None` while no
            tag has come.
        """
        if self._tail:
            # Text was held back before, so a copy is needed, at most once for each call.
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
        """End the text without a tag; return the text that was held back."""
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
