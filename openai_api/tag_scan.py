"""Finding a tag in text that arrives in pieces of any size, in linear time."""

from __future__ import annotations


def partial_tag_len(text: str, tag: str) -> int:
    """How many characters at the end of `text` may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
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

    def feed(self, text: str) -> tuple[str, str | None]:
        """Take more text.

        Returns:
            What may pass, and what follows the tag (`None` while it has not come).
        """
        data = self._tail + text
        at = data.find(self._tag)
        if at >= 0:
            passed = self._pass(data[:at])
            if self._keep_space:
                passed += "".join(self._space)
            self._space, self._tail = [], ""
            return passed, data[at + len(self._tag) :]
        held = partial_tag_len(data, self._tag)
        self._tail = data[len(data) - held :]
        return self._pass(data[: len(data) - held]), None

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
