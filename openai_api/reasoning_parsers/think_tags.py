"""Reasoning between `<think>` and `</think>`, as Qwen 3, DeepSeek and many others write it."""

from __future__ import annotations

from openai_api.parser_signs import Signs
from openai_api.reasoning_parsers.reasoning_parser import SplitText, implied_ends
from runtime.text.tag_scan import UntilTag
from runtime.text.thoughts import MAX_LEADING_SPACE

OPEN_TAG = "<think>"
CLOSE_TAG = "</think>"


class ThinkTags:
    """Splits at the tags; whitespace around the tags belongs to neither part.

    Output that does not begin with the open tag is an answer from its first character, unless the
    prompt ended with the open tag. So no text is lost if a model skips reasoning.
    """

    open_tag = OPEN_TAG
    close_tag = CLOSE_TAG
    lead = ""
    ends_before: tuple[str, ...] = ()
    call_opens: tuple[str, ...] = ()
    forced_end = f"\n{CLOSE_TAG}\n\n"
    bridge = ""
    reopen_tag = ""
    splits = True
    markers: tuple[str, ...] = (OPEN_TAG, CLOSE_TAG)
    # The open tag is not a sign, because some templates never write it: they drop earlier
    # reasoning.
    signs = Signs(template=(CLOSE_TAG,), response={"open": OPEN_TAG, "content": "text"})

    def __init__(self, *, prompt_is_open: bool, may_call: bool = True) -> None:
        """Begin an output.

        Args:
            prompt_is_open: whether the prompt ends inside reasoning, so that the output begins
                there.
            may_call: whether the output may contain tool calls.
        """
        self.has_reasoned = prompt_is_open
        self.is_reasoning = prompt_is_open
        self._start: str | None = ""
        self._skip_space = False
        self._until_close = UntilTag(self.close_tag, *implied_ends(type(self), may_call=may_call))

    def feed(self, text: str) -> list[SplitText]:
        """Add more output; return its parts of reasoning and answer, in order."""
        if self._start is not None:
            text = self._decide_start(text)
        return [self._split(text)]

    def finish(self) -> list[SplitText]:
        """End the output; return the text that was held back."""
        undecided, self._start = self._start or "", None
        self._skip_space = self._skip_space or (bool(undecided) and self.is_reasoning)
        reasoning, content = self._split(undecided)
        if self.is_reasoning:
            reasoning += self._until_close.finish()
        return [SplitText(reasoning, content)]

    def _decide_start(self, text: str) -> str:
        start = f"{self._start}{text}"
        begun = start.lstrip()
        may_open = len(start) - len(begun) <= MAX_LEADING_SPACE
        if may_open and len(begun) < len(self.open_tag) and self.open_tag.startswith(begun):
            self._start = start
            return ""
        self._start = None
        if may_open and begun.startswith(self.open_tag):
            self.has_reasoned = self.is_reasoning = True
            self._skip_space = True
            return begun[len(self.open_tag) :]
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
        if self._until_close.found != self.close_tag:
            # Another text than the close tag ended the reasoning, and belongs to the answer.
            return SplitText(reasoning, self._until_close.found + text[end:])
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
    """Reads output of models that always reason first and may omit the open tag."""

    # A template does not show that a model always reasons. (If a template writes the open tag
    # itself, the prompt is open, which `ThinkTags` handles.)
    signs = Signs()

    def __init__(
        self,
        *,
        prompt_is_open: bool,  # noqa: ARG002  # these models always reason first
        may_call: bool = True,
    ) -> None:
        """Begin inside reasoning, whether or not the prompt ends there."""
        super().__init__(prompt_is_open=True, may_call=may_call)


class AppendThink:
    """MiniMax's `minimax-append-think`: puts the prompt's open tag back, and splits nothing.

    It is for clients that look for the tags in the content.
    """

    open_tag = OPEN_TAG
    close_tag = CLOSE_TAG
    lead = ""
    ends_before: tuple[str, ...] = ()
    call_opens: tuple[str, ...] = ()
    forced_end = f"\n{CLOSE_TAG}\n\n"
    bridge = ""
    reopen_tag = ""
    splits = False
    markers: tuple[str, ...] = (OPEN_TAG, CLOSE_TAG)
    signs = Signs()

    def __init__(self, *, prompt_is_open: bool, may_call: bool = True) -> None:  # noqa: ARG002  # these models always reason
        """Begin inside reasoning, which is reported as content."""
        self.has_reasoned = False
        self.is_reasoning = True
        self._has_begun = False
        self._until_close = UntilTag(CLOSE_TAG, keep_space=True)

    def feed(self, text: str) -> list[SplitText]:
        """Add more output; all of it is content."""
        if not text:
            return []
        if self.is_reasoning and self._until_close.feed(text)[1] is not None:
            self.is_reasoning = False
        opening = "" if self._has_begun else OPEN_TAG
        self._has_begun = True
        return [SplitText("", opening + text)]

    def finish(self) -> list[SplitText]:
        """End the output; no text was held back."""
        return []
