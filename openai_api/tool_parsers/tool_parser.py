"""What a tool-call parser is: one state machine, fed with pieces, for streams and whole texts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

from openai_api.parser_signs import Signs


@dataclass(frozen=True)
class ParsedCall:
    """One complete call.

    Attributes:
        arguments: a JSON object, as text.
    """

    name: str
    arguments: str


@dataclass(frozen=True)
class CallForm:
    """How a call is written around its arguments, a JSON object: what grammars are made from.

    Attributes:
        trigger: begins every call, and nothing else.
        begin: from a function's name to the text before the arguments; starts with `trigger`.
        end: the text behind the arguments.
        separator: the text between two calls.
    """

    trigger: str
    begin: Callable[[str], str]
    end: str
    separator: str = ""


class ToolParser(Protocol):
    """Splits a model's output into text and calls.

    Attributes:
        markers: texts that must stay visible in the output for the parser to work.
        signs: what shows that a model writes calls so.
        call_form: `None` where the arguments are not JSON: no grammar then holds for calls.
    """

    markers: tuple[str, ...]
    signs: Signs
    call_form: CallForm | None

    def __init__(self, names: Collection[str], *, max_calls: int | None) -> None:
        """Accept calls of these functions only, and at most `max_calls` of them."""

    def feed(self, text: str) -> list[str | ParsedCall]:
        """Take more output: texts and calls in their order."""

    def finish(self) -> list[str | ParsedCall]:
        """The output is over: what was held back."""
