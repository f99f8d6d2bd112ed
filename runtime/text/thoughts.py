"""Finds where an output's thoughts end and its answer begins, in a text that arrives in pieces.

The parsers of the front process separate thoughts and answer for the client. This module finds only
positions: for stop strings, which end the answer, and for counts and log-probabilities of tokens in
each part.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from runtime.requests.sampling_params import ThoughtTexts
from runtime.text.tag_scan import UntilTag

# The most whitespace before the text that opens thoughts; the bound keeps the time linear.
MAX_LEADING_SPACE = 64
# The most characters of a message's header (role, channel, recipient and type).
MAX_HEADER = 512


class Part(NamedTuple):
    """A part of an output.

    Attributes:
        text: the part's text.
        kind: `thought`, with the texts that open and end it; `answer`; or `mark` for headers of
            messages and blanks after thoughts, which belong to neither.
    """

    text: str
    kind: Literal["thought", "mark", "answer"]

    @property
    def is_answer(self) -> bool:
        """Whether the part belongs to the answer."""
        return self.kind == "answer"


class ThoughtScan:
    """Divides an output into parts; every character is in one.

    Attributes:
        is_over: whether everything that follows belongs to the answer.
    """

    def __init__(self, texts: ThoughtTexts) -> None:
        """Search for the texts that separate thoughts from the answer."""
        self._texts = texts
        self.is_over = False
        self._start: str | None = "" if texts.open else None
        self._header = ""
        self._until_end = UntilTag(*texts.ends, *texts.implied, keep_space=True)
        self._until_header = UntilTag(*texts.headers, keep_space=True)
        self._until_body = UntilTag(texts.body, keep_space=True)
        self._state = self._in_thoughts if texts.is_open else self._in_answer

    def feed(self, text: str) -> list[Part]:
        """Add more output; return its parts in order."""
        parts: list[Part] = []
        if self._start is not None:
            text = self._decide_start(text, parts)
        place = 0
        while place < len(text):
            place = self._state(text, place, parts)
        return [part for part in parts if part.text]

    def finish(self) -> list[Part]:
        """End the output; return the parts that were held back."""
        held, self._start = self._start or "", None
        is_thought = self._state in (self._in_thoughts, self._in_hidden_message)
        is_answer = self._state == self._in_answer
        for each in (self._until_end, self._until_header, self._until_body):
            held += each.finish()
        if not held:
            return []
        return [Part(held, "answer" if is_answer else "thought" if is_thought else "mark")]

    def _decide_start(self, text: str, parts: list[Part]) -> str:
        start = f"{self._start}{text}"
        begun = start.lstrip()
        num_blank = len(start) - len(begun)
        if num_blank <= MAX_LEADING_SPACE:
            if len(begun) < len(self._texts.open) and self._texts.open.startswith(begun):
                self._start = start
                return ""
            if begun.startswith(self._texts.open):
                end = num_blank + len(self._texts.open)
                parts.append(Part(start[:end], "thought"))
                start = start[end:]
                self._state = self._in_thoughts
        self._start = None
        self.is_over = self._state == self._in_answer and not self._texts.headers
        return start

    # ---- states: each one reads from index `place`, and returns where it ended ----

    def _in_thoughts(self, text: str, place: int, parts: list[Part]) -> int:
        passed, end = self._until_end.feed(text, place)
        if end is None:
            parts.append(Part(passed, "thought"))
            return len(text)
        tag = self._until_end.found
        if tag in self._texts.implied:
            parts += [Part(passed, "thought"), Part(tag, "answer")]
            self._state = self._in_answer
        else:
            parts.append(Part(passed + tag, "thought"))
            self._state = self._behind_thoughts
        self.is_over = True
        return end

    def _behind_thoughts(self, text: str, place: int, parts: list[Part]) -> int:
        begin = len(text) - len(text[place:].lstrip())
        parts.append(Part(text[place:begin], "mark"))
        if begin < len(text):
            self._state = self._in_answer
        return begin

    def _in_answer(self, text: str, place: int, parts: list[Part]) -> int:
        if not self._texts.headers:
            parts.append(Part(text[place:], "answer"))
            return len(text)
        return self._in_message(text, place, parts, is_answer=True)

    def _in_hidden_message(self, text: str, place: int, parts: list[Part]) -> int:
        return self._in_message(text, place, parts, is_answer=False)

    def _in_message(self, text: str, place: int, parts: list[Part], *, is_answer: bool) -> int:
        passed, end = self._until_header.feed(text, place)
        parts.append(Part(passed, "answer" if is_answer else "thought"))
        if end is None:
            return len(text)
        self._header = self._until_header.found
        parts.append(Part(self._header, "mark"))
        self._state = self._in_header
        return end

    def _in_header(self, text: str, place: int, parts: list[Part]) -> int:
        passed, end = self._until_body.feed(text, place)
        parts.append(Part(passed, "mark"))
        self._header += passed
        if end is not None:
            parts.append(Part(self._until_body.found, "mark"))
            is_thought = self._texts.thought in self._header
            self._state = self._in_hidden_message if is_thought else self._in_answer
        elif len(self._header) > MAX_HEADER:
            parts.append(Part(self._until_body.finish(), "mark"))
            self._state = self._in_answer
        return len(text) if end is None else end
