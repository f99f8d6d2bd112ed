"""The protocol of tool-call parsers, which are fed an output in pieces or at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from openai_api.call_ids import IdForm
from openai_api.parser_signs import Signs

# The functions that a request offers: unchecked parameter schemas by name.
Functions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a call; its arguments follow.

    Attributes:
        name: the function's name.
        id: the id that the model wrote; `None` if the model's format has no ids.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """More text of a call's arguments: part of a JSON object, or whatever the model wrote."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call.

    Attributes:
        is_complete: whether the arguments are a whole JSON object. If not, the output ended inside
            them, or they are not JSON.
    """

    is_complete: bool


ToolPart = str | CallBegin | CallArguments | CallEnd


# The formats of arguments, by their names in structural tags.
ArgumentStyle = Literal["json", "qwen_xml", "glm_xml", "minimax_xml"]


@dataclass(frozen=True)
class CallForm:
    """The text of calls around their arguments, from which grammars are made.

    A call is `trigger begin {...} end`. A series of calls is `trigger opening begin {...} end
    separator begin {...} end closing`.

    Attributes:
        trigger: text that begins every call or series of calls, and no other text.
        begin: returns the text before the arguments, given the function's name.
        end: the text after the arguments.
        separator: the text between two calls.
        style: the format of the arguments.
        between: a regular expression for text between `begin` and the arguments.
        opening: a regular expression for the text before the first call of a series.
        closing: the text after the last call of a series; `None` if each call has a trigger.
        stands_alone: whether an output may consist of calls only.
        no_call: set if calls at the beginning of an output need no trigger, and no text follows
            them. It is a function from the offered functions' names to a regular expression. The
            expression matches the shortest beginnings that show that an output does not begin with
            a call.
        others: other formats that the family's models write and its parser reads.
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

    A call that has begun stays a call. If its arguments stop being JSON, they are passed on as the
    model wrote them, up to the end of the call.

    Attributes:
        markers: texts that must not be hidden in the output, because the parser looks for them.
        signs: signs in a model's files that it writes calls in this format.
        call_form: the format of calls; `None` if no grammar can describe a call.
        id_form: the form of call ids; `None` if the family's templates accept any id.
    """

    markers: tuple[str, ...]
    signs: Signs
    call_form: CallForm | None
    id_form: IdForm | None

    def __init__(self, functions: Functions, *, max_calls: int | None) -> None:
        """Accept at most `max_calls` calls, of the given functions only."""

    def feed(self, text: str) -> list[ToolPart]:
        """Add more output; return texts and parts of calls, in order."""

    def finish(self) -> list[ToolPart]:
        """End the output; return the text that was held back, and the end of an open call."""
