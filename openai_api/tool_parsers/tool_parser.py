"""What a tool-call parser is: one state machine, fed with pieces, for streams and whole texts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ParsedCall:
    """One complete call.

    Attributes:
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


class ToolParser(Protocol):
    """Splits a model's output into text and calls.

    Attributes:
        markers: texts that must stay visible in the output for the parser to work.
    """

    markers: tuple[str, ...]

    def __init__(self, names: Collection[str], *, max_calls: int | None) -> None:
        """Accept calls of these functions only, and at most `max_calls` of them."""

    def feed(self, text: str) -> list[str | ParsedCall]:
        """Take more output: texts and calls in their order."""

    def finish(self) -> list[str | ParsedCall]:
        """The output is over: what was held back."""
