"""A model's output, cut into reasoning, text and tool calls: the same machine for every answer.

A stream feeds it piece by piece, a plain answer feeds it once: both come out the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from openai_api.reasoning_parsers.reasoning_parser import ReasoningParser
from openai_api.tool_parsers.tool_parser import ParsedCall, ToolParser


@dataclass(frozen=True)
class ReasoningText:
    """More reasoning."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """A complete tool call; `index` counts them."""

    index: int
    call: ParsedCall


OutputEvent = ReasoningText | ContentText | Call


class OutputParser:
    """Reasoning first, then tool calls in what is left; each is optional."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        stream_reasoning: bool = True,
    ) -> None:
        """With `stream_reasoning` false, reasoning comes out in one piece when it is over."""
        self._reasoning = reasoning
        self._tools = tools
        self._stream_reasoning = stream_reasoning
        self._held: list[str] = []
        self.num_calls = 0

    @property
    def has_reasoned(self) -> bool:
        """Whether some of the output was reasoning."""
        return self._reasoning is not None and self._reasoning.has_reasoned

    def feed(self, text: str) -> list[OutputEvent]:
        """Take more output."""
        if self._reasoning is None:
            return self._content(text)
        return self._split(*self._reasoning.feed(text), over=not self._reasoning.is_reasoning)

    def finish(self) -> list[OutputEvent]:
        """The output is over: what was held back."""
        events: list[OutputEvent] = []
        if self._reasoning is not None:
            events = self._split(*self._reasoning.finish(), over=True)
        if self._tools is not None:
            events += self._numbered(self._tools.finish())
        return events

    def _split(self, reasoning: str, content: str, *, over: bool) -> list[OutputEvent]:
        if not self._stream_reasoning:
            self._held.append(reasoning)
            reasoning = ""
            if over:
                reasoning, self._held = "".join(self._held), []
        events: list[OutputEvent] = [ReasoningText(reasoning)] if reasoning else []
        return events + self._content(content)

    def _content(self, text: str) -> list[OutputEvent]:
        if not text:
            return []
        if self._tools is None:
            return [ContentText(text)]
        return self._numbered(self._tools.feed(text))

    def _numbered(self, parts: list[str | ParsedCall]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for part in parts:
            if isinstance(part, str):
                events.append(ContentText(part))
            else:
                events.append(Call(self.num_calls, part))
                self.num_calls += 1
        return events
