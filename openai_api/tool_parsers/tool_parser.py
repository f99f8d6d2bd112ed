"""What a tool-call parser is: one state machine, fed with pieces, for streams and whole texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from openai_api.call_ids import IdForm
from openai_api.parser_signs import Signs

# The functions that a request offers: parameters' schemas by name, unchecked.
Functions = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class CallBegin:
    """A function is called; its arguments follow.

    Attributes:
        id: as the model wrote it; `None` where its form has none.
    """

    name: str
    id: str | None = None


@dataclass(frozen=True)
class CallArguments:
    """More of the arguments: the beginning of a JSON object, or of what the model wrote instead."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is over.

    Attributes:
        is_complete: its arguments are a whole JSON object. Else the output broke off in them, or
            they are not JSON.
    """

    is_complete: bool


ToolPart = str | CallBegin | CallArguments | CallEnd


# How arguments are written, by the names that structural tags have for it.
ArgumentStyle = Literal["json", "qwen_xml", "glm_xml", "minimax_xml"]


@dataclass(frozen=True)
class CallForm:
    """How calls are written around their arguments: what grammars are made from.

    `trigger begin {...} end`, or as a series `trigger opening begin {...} end separator begin {...}
    end closing`.

    Attributes:
        trigger: begins every call or series of calls, and nothing else.
        begin: from a function's name to the text before the arguments.
        end: the text behind the arguments.
        separator: the text between two calls.
        style: of the arguments.
        between: what stands between `begin` and the arguments, as a regular expression.
        opening: what stands before the first call of a series, as a regular expression.
        closing: the text behind the last call of a series; `None` where each has its trigger.
        stands_alone: calls may be all of an output.
        no_call: from the offered functions' names to a regular expression of the shortest
            beginnings that tell an output from one that begins with calls without their trigger.
            Where it is given, an output may begin so, and calls are the last of it.
        others: other ways that the family's models, and its parser, know.
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

    A call that has begun stays one: where its arguments stop being JSON they go on as the model
    wrote them, up to the end of the call.

    Attributes:
        markers: texts that must stay visible in the output for the parser to work.
        signs: what shows that a model writes calls so.
        call_form: `None` where no grammar can describe a call.
        id_form: of calls' ids; `None` where the family's templates take any.
    """

    markers: tuple[str, ...]
    signs: Signs
    call_form: CallForm | None
    id_form: IdForm | None

    def __init__(self, functions: Functions, *, max_calls: int | None) -> None:
        """Accept calls of these functions only, and at most `max_calls` of them."""

    def feed(self, text: str) -> list[ToolPart]:
        """Take more output: texts and parts of calls in their order."""

    def finish(self) -> list[ToolPart]:
        """The output is over: what was held back, and the end of a call that is open."""
