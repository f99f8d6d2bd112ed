"""Reasoning between `<think>` and `</think>`, as Qwen 3 and DeepSeek R1 write it."""

from __future__ import annotations

from openai_api.parser_signs import Signs
from openai_api.reasoning_parsers.reasoning_parser import SplitText
from openai_api.tag_scan import UntilTag

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"

# Whitespace that may stand before the open tag: a bound keeps a flood of it linear.
MAX_LEADING_SPACE = 64


class ThinkTags:
    """Splits at the tags; whitespace around the tags belongs to neither part.

    Output that does not begin with the open tag is an answer from its first character, unless the
    prompt ended with the open tag: so a model that skips reasoning loses nothing.
    """

    close_tag = CLOSE_TAG
    markers: tuple[str, ...] = (OPEN_TAG, CLOSE_TAG)
    # Some templates cut earlier reasoning off and never write the open tag.
    signs = Signs(template=(CLOSE_TAG,), response={"open": OPEN_TAG, "content": "text"})

    def __init__(self, *, prompt_is_open: bool) -> None:
        """Say whether the prompt itself ends inside reasoning."""
        self.has_reasoned = prompt_is_open
        self.is_reasoning = prompt_is_open
        self._start: str | None = ""
        self._skip_space = False
        self._until_close = UntilTag(CLOSE_TAG)

    def feed(self, text: str) -> SplitText:
        """Take more output."""
        if self._start is not None:
            text = self._decide_start(text)
        return self._split(text)

    def finish(self) -> SplitText:
        """The output is over: what was held back."""
        undecided, self._start = self._start or "", None
        self._skip_space = self._skip_space or (bool(undecided) and self.is_reasoning)
        reasoning, content = self._split(undecided)
        if self.is_reasoning:
            reasoning += self._until_close.finish()
        return SplitText(reasoning, content)

    def _decide_start(self, text: str) -> str:
        start = f"{self._start}{text}"
        begun = start.lstrip()
        may_open = len(start) - len(begun) <= MAX_LEADING_SPACE
        if may_open and len(begun) < len(OPEN_TAG) and OPEN_TAG.startswith(begun):
            self._start = start
            return ""
        self._start = None
        if may_open and begun.startswith(OPEN_TAG):
            self.has_reasoned = self.is_reasoning = True
            self._skip_space = True
            return begun[len(OPEN_TAG) :]
        self._skip_space = self.is_reasoning
        return start

    def _split(self, text: str) -> SplitText:
        text = self._without_space(text)
        if not text or not self.is_reasoning:
            return SplitText("", text)
        reasoning, end = self._until_close.feed(text)
        if end is None:
            return SplitText(reasoning, "")
        self.is_reasoning = False
        self._skip_space = True
        return SplitText(reasoning, self._without_space(text[end:]))

    def _without_space(self, text: str) -> str:
        if not self._skip_space:
            return text
        text = text.lstrip()
        if text:
            self._skip_space = False
        return text


class AlwaysThinking(ThinkTags):
    """For models that always reason first and may leave out the open tag."""

    # No template tells that: where it opens reasoning itself, `ThinkTags` sees it in the prompt.
    signs = Signs()

    def __init__(self, *, prompt_is_open: bool) -> None:  # noqa: ARG002  # the models' habit wins
        """Start inside reasoning whatever the prompt says."""
        super().__init__(prompt_is_open=True)
