"""Splits a model's output into reasoning, content and tool calls.

A streamed answer is fed piece by piece, a complete answer at once. Both use the same state machine,
so the results are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from openai_api.call_ids import AnswerIds
from openai_api.reasoning_parsers.reasoning_parser import ReasoningParser, SplitText
from openai_api.tool_parsers.tool_parser import CallArguments, CallBegin, ToolParser, ToolPart


@dataclass(frozen=True)
class ReasoningText:
    """An event: more text of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentText:
    """An event: more text of the answer's content."""

    text: str


@dataclass(frozen=True)
class BeginCall:
    """An event: a tool call begins.

    `index` is its number in the answer. `id` is the id that the model wrote, or that its family
    needs; `None` if there is neither.
    """

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True)
class MoreArguments:
    """An event: more text of a call's arguments, which are JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class EndCall:
    """An event: a call ends; it is complete if its arguments were not cut off and are JSON."""

    index: int
    is_complete: bool


OutputEvent = ReasoningText | ContentText | BeginCall | MoreArguments | EndCall


@dataclass(frozen=True)
class Call:
    """A whole tool call, combined from its events."""

    index: int
    name: str
    arguments: str
    is_complete: bool


class OutputParser:
    """Splits off the reasoning first, then finds tool calls in the rest. Both are optional."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        stream_reasoning: bool = True,
        ids: AnswerIds | None = None,
    ) -> None:
        """Start at the beginning of an output.

        Args:
            reasoning: splits the reasoning off.
            tools: finds calls in the rest.
            stream_reasoning: whether reasoning is returned as it arrives; else in one piece at its
                end.
            ids: makes the ids of calls; by default calls keep the ids that the model writes.
        """
        self._reasoning = reasoning
        self._tools = tools
        self._stream_reasoning = stream_reasoning
        self._ids = ids or AnswerIds()
        self._held: list[str] = []
        self.num_calls = 0

    @property
    def splits_thoughts(self) -> bool:
        """Whether reasoning is split off; otherwise it stays in the content."""
        return self._reasoning is not None and self._reasoning.splits

    @property
    def has_reasoned(self) -> bool:
        """Whether some of the output so far was reasoning."""
        return self._reasoning is not None and self._reasoning.has_reasoned

    def feed(self, text: str) -> list[OutputEvent]:
        """Add more output; return the new events."""
        if self._reasoning is None:
            return self._content(text)
        return self._split(self._reasoning.feed(text), over=not self._reasoning.is_reasoning)

    def finish(self) -> list[OutputEvent]:
        """End the output; return the events that were held back."""
        events: list[OutputEvent] = []
        if self._reasoning is not None:
            events = self._split(self._reasoning.finish(), over=True)
        if self._tools is not None:
            events += self._numbered(self._tools.finish())
        return events

    def _split(self, parts: Iterable[SplitText], *, over: bool) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for reasoning, content in parts:
            if self._stream_reasoning:
                events += [ReasoningText(reasoning)] if reasoning else []
            elif reasoning:
                self._held.append(reasoning)
            if content:
                events += self._released() + self._content(content)
        return events + (self._released() if over else [])

    def _released(self) -> list[OutputEvent]:
        held, self._held = "".join(self._held), []
        return [ReasoningText(held)] if held else []

    def _content(self, text: str) -> list[OutputEvent]:
        if not text:
            return []
        if self._tools is None:
            return [ContentText(text)]
        return self._numbered(self._tools.feed(text))

    def _numbered(self, parts: list[ToolPart]) -> list[OutputEvent]:
        events: list[OutputEvent] = []
        for part in parts:
            if isinstance(part, str):
                events.append(ContentText(part))
            elif isinstance(part, CallBegin):
                call_id = self._ids.of(part.name, part.id, self.num_calls)
                events.append(BeginCall(self.num_calls, part.name, call_id))
                self.num_calls += 1
            elif isinstance(part, CallArguments):
                events.append(MoreArguments(self.num_calls - 1, part.text))
            else:
                events.append(EndCall(self.num_calls - 1, part.is_complete))
        return events


class WholeCalls:
    """Combines the events of each call to one `Call`, for APIs that send whole calls."""

    def __init__(self) -> None:
        """Begin outside a call."""
        self._name = ""
        self._arguments: list[str] = []

    def feed(self, events: Iterable[OutputEvent]) -> Iterator[ReasoningText | ContentText | Call]:
        """Yield the events, with one `Call` at the end of each call in place of its events."""
        for event in events:
            if isinstance(event, BeginCall):
                self._name, self._arguments = event.name, []
            elif isinstance(event, MoreArguments):
                self._arguments.append(event.text)
            elif isinstance(event, EndCall):
                arguments = "".join(self._arguments)
                yield Call(event.index, self._name, arguments, event.is_complete)
            else:
                yield event
