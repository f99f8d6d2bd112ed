"""What a reasoning parser is: one state machine, fed with pieces, for streams and whole texts."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from openai_api.parser_signs import Signs


class SplitText(NamedTuple):
    """What one piece of output adds to each part."""

    reasoning: str
    content: str


class ReasoningParser(Protocol):
    """Splits a model's output into its reasoning and its answer.

    Attributes:
        close_tag: the text that ends reasoning, also looked for as a token to count tokens.
        markers: texts that must stay visible in the output for the parser to work.
        signs: what shows that a model reasons so.
        has_reasoned: whether reasoning has begun.
        is_reasoning: whether the output fed so far ends inside reasoning.
    """

    close_tag: str
    markers: tuple[str, ...]
    signs: Signs
    has_reasoned: bool
    is_reasoning: bool

    def __init__(self, *, prompt_is_open: bool) -> None:
        """Say whether the prompt itself ends inside reasoning."""

    def feed(self, text: str) -> SplitText:
        """Take more output."""

    def finish(self) -> SplitText:
        """The output is over: what was held back."""
