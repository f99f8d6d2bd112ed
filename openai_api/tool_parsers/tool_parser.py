"""The tool-call parser protocol: one state machine, fed in pieces, for streams and whole texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from openai_api.call_ids import IdForm
from openai_api.parser_signs import Signs

# The functions that a request offers: maps names to parameter schemas, unchecked.
Functions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class CallBegin:
    """A call begins; its arguments follow.

    Attributes:
        id: the id that the model wrote; `None` if the model's form has no ids.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments: part of a JSON object, or of other text that the model wrote."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call ends.

    Attributes:
        is_complete: the arguments are a whole JSON object. Otherwise the output ended inside them,
            or they are not JSON.
    """

    is_complete: bool


ToolPart = str | CallBegin | CallArguments | CallEnd


# The form of arguments, by its name in structural tags.
ArgumentStyle = Literal["json", "qwen_xml", "glm_xml", "minimax_xml"]


@dataclass(frozen=True)
class CallForm:
    """The text of calls around their arguments, from which grammars are made.

    `trigger begin {...} end`, or as a series `trigger opening begin {...} end separator begin {...}
    end closing`.

    Attributes:
        trigger: text that begins every call or series of calls, and no other text.
        begin: maps a function's name to the text before the arguments.
        end: the text after the arguments.
        separator: the text between two calls.
        style: the style of the arguments.
        between: a regular expression for the text between `begin` and the arguments.
        opening: a regular expression for the text before the first call of a series.
        closing: the text after the last call of a series; `None` if each call has a trigger.
        stands_alone: an output may consist of calls only.
        no_call: maps the offered functions' names to a regular expression. The expression matches
            the shortest beginnings which show that an output does not begin with calls without a
            trigger. If `no_call` is given, an output may begin with such calls, and no text follows
            calls.
        others: other forms that the family's models write and its parser reads.
    """

    trigger: str
    begin: Callable[[str], str]
    end: str
    separator: str = ""
    style: ArgumentStyle = "json"
    between: str = ""
    opening: str = ""
    closing: str | None = None
    stands_alone: bool = True
    no_call: Callable[[Sequence[str]], str] | None = None
    others: tuple[CallForm, ...] = ()


class ToolParser(Protocol):
    """Splits a model's output into text and calls.

    A call that has begun stays a call: if its arguments stop being JSON, they are passed on as the
    model wrote them, up to the end of the call.

    Attributes:
        markers: texts that must stay visible in the output for the parser to work.
        signs: the signs that a model writes calls in this form.
        call_form: the form of calls; `None` if no grammar can describe a call.
        id_form: the form of calls' ids; `None` if the family's templates accept any id.
    """

    markers: tuple[str, ...]
    signs: Signs
    call_form: CallForm | None
    id_form: IdForm | None

    def __init__(self, functions: Functions, *, max_calls: int | None) -> None:
        """Accept at most `max_calls` calls, and only calls of the given functions."""

    def feed(self, text: str) -> list[ToolPart]:
        """Take more output; return texts and parts of calls, in order."""

    def finish(self) -> list[ToolPart]:
        """End the output; return the text that was held back, and the end of an open call."""
