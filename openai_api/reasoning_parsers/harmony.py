"""Reasoning of gpt-oss, which writes messages in channels.

Messages in the channel `analysis` are reasoning, all others belong to the answer. The header of a
message to a function is kept for the tool-call parser; other headers are dropped.
"""

from __future__ import annotations

import re

from openai_api.parser_signs import Signs
from openai_api.reasoning_parsers.reasoning_parser import SplitText
from openai_api.tool_parsers.gpt_oss import CALL, CHANNEL, END, MESSAGE, RETURN, START
from runtime.text.tag_scan import UntilTag
from runtime.text.thoughts import MAX_HEADER

_ANALYSIS = f"{CHANNEL}analysis"
_FINAL = f"{CHANNEL}final{MESSAGE}"
_CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=")
_BODY_TAGS = (START, CHANNEL, END, CALL, RETURN)


class HarmonyChannels:
    """Splits gpt-oss's messages by channel. Reasoning may come before and between messages."""

    open_tag = f"{_ANALYSIS}{MESSAGE}"
    close_tag = END
    lead = _FINAL
    # The beginning of the next message.
    ends_before: tuple[str, ...] = (START, CHANNEL)
    call_opens: tuple[str, ...] = ()
    forced_end = END
    bridge = f"{START}assistant{_FINAL}"
    reopen_tag = _ANALYSIS
    splits = True
    markers: tuple[str, ...] = (CHANNEL, MESSAGE, START, END)
    signs = Signs(template=(_ANALYSIS, MESSAGE, END))

    def __init__(self, *, prompt_is_open: bool, may_call: bool = True) -> None:  # noqa: ARG002  # always false
        """Expect the first message."""
        self.has_reasoned = self.is_reasoning = False
        self._body = UntilTag(*_BODY_TAGS, keep_space=True)
        # Whether the current message is reasoning, and whether it is a call, whose header is kept.
        self._reasons = False
        self._is_call = False
        self._header: list[str] | None = None
        self._num_read = 0
        self._until_message = UntilTag(MESSAGE, keep_space=True)

    def feed(self, text: str) -> list[SplitText]:
        """Take more output; return the new parts of reasoning and answer, in order."""
        parts: list[SplitText] = []
        place = 0
        while place < len(text):
            if self._header is None:
                place = self._in_body(text, place, parts)
            else:
                place = self._in_header(text, place, parts)
        return parts

    def finish(self) -> list[SplitText]:
        """End the output; return the text that was held back."""
        if self._header is None:
            return [self._part(self._body.finish())]
        header, self._header = [*self._header, self._until_message.finish()], None
        return [SplitText("", "".join(header))]

    def _part(self, text: str) -> SplitText:
        return SplitText(text, "") if self._reasons else SplitText("", text)

    def _in_body(self, text: str, place: int, parts: list[SplitText]) -> int:
        passed, end = self._body.feed(text, place)
        tag = "" if end is None else self._body.found
        if self._is_call and tag in (END, CALL, RETURN):
            passed += tag
        if passed:
            parts.append(self._part(passed))
        if end is None:
            return len(text)
        self._reasons = self._is_call = False
        if tag in (START, CHANNEL):
            self._header, self._num_read = [tag], 0
            self._until_message = UntilTag(MESSAGE, keep_space=True)
        return end

    def _in_header(self, text: str, place: int, parts: list[SplitText]) -> int:
        assert self._header is not None
        piece = text[place : place + MAX_HEADER - self._num_read]
        passed, end = self._until_message.feed(piece)
        self._num_read += len(piece)
        self._header.append(passed)
        if end is None and self._num_read < MAX_HEADER:
            return len(text)
        header = "".join(self._header)
        self._header = None
        if end is None:
            parts.append(SplitText("", header + self._until_message.finish()))
            return place + len(piece)
        channel = _CHANNEL_NAME.search(header)
        self._is_call = _RECIPIENT.search(header) is not None
        self._reasons = not self._is_call and channel is not None and channel[1] == "analysis"
        self.has_reasoned = self.has_reasoned or self._reasons
        self.is_reasoning = self._reasons
        if self._is_call:
            parts.append(SplitText("", header + MESSAGE))
        return place + end
