"""Finding a tag in text that arrives in pieces of any size, in linear time."""

from __future__ import annotations


def partial_tag_len(text: str, tag: str, begin: int = 0) -> int:
    """How many characters at the end of `text[begin:]` may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text) - begin), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0


class UntilTag:
    """Lets text pass until a tag, holding back only what may still turn out to be the tag.

    Whitespace right before the tag belongs to the tag (models put it on a line of its own), so it
    is held back as well and dropped when the tag follows; `keep_space` passes it on instead.
    """

    def __init__(self, tag: str, *, keep_space: bool = False) -> None:
        """Look for `tag`."""
        self._tag = tag
        self._keep_space = keep_space
        self._space: list[str] = []
        self._tail = ""

    def feed(self, text: str, begin: int = 0) -> tuple[str, int | None]:
        """Take more text: `text` from `begin` on.

        Places, not what follows them: a copy of the rest at each tag would make a text full of tags
        take quadratic time.

        Returns:
            What may pass, and where in `text` the tag ends (`None` while it has not come).
        """
        if self._tail:
            # Held back from the text before, so this is copied once for each text at most.
            text, begin, moved = self._tail + text[begin:], 0, begin - len(self._tail)
        else:
            moved = 0
        at = text.find(self._tag, begin)
        if at >= 0:
            passed = self._pass(text[begin:at])
            if self._keep_space:
                passed += "".join(self._space)
            self._space, self._tail = [], ""
            return passed, at + len(self._tag) + moved
        end = len(text) - partial_tag_len(text, self._tag, begin)
        self._tail = text[end:]
        return self._pass(text[begin:end]), None

    def finish(self) -> str:
        """The text is over without the tag: what was held back."""
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
