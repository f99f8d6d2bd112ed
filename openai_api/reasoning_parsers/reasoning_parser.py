"""The protocol of reasoning parsers, which are fed an output in pieces or at once."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from openai_api.parser_signs import Signs
from runtime.requests.sampling_params import ThoughtTexts


class SplitText(NamedTuple):
    """More text of the reasoning, followed by more text of the answer."""

    reasoning: str
    content: str


class ReasoningParser(Protocol):
    """Splits a model's output into its reasoning and its answer.

    Attributes:
        open_tag: the text that begins reasoning.
        close_tag: the text that ends reasoning.
        lead: the text that an answer without reasoning must begin with; may be empty.
        ends_before: texts that end reasoning without its close tag, and belong to the text that
            follows.
        call_opens: texts that begin calls. If calls are allowed, these texts also end reasoning.
        forced_end: the text that ends reasoning whose budget is used up.
        bridge: the text that must stand between the end of reasoning and an answer; may be empty.
        reopen_tag: the text that begins reasoning again after `close_tag`; empty if no text does.
        markers: texts that must not be hidden in the output, because the parser looks for them.
        splits: whether reasoning is split off from the answer.
        signs: signs in a model's files that its outputs have this format.
        has_reasoned: whether reasoning has begun.
        is_reasoning: whether the output so far ends inside reasoning.
    """

    open_tag: str
    close_tag: str
    lead: str
    ends_before: tuple[str, ...]
    call_opens: tuple[str, ...]
    forced_end: str
    bridge: str
    reopen_tag: str
    markers: tuple[str, ...]
    splits: bool
    signs: Signs
    has_reasoned: bool
    is_reasoning: bool

    def __init__(self, *, prompt_is_open: bool, may_call: bool = True) -> None:
        """Begin with an empty output.

        Args:
            prompt_is_open: whether the prompt ends inside reasoning.
            may_call: whether the output may contain tool calls.
        """

    def feed(self, text: str) -> list[SplitText]:
        """Add more output; return its parts of reasoning and answer, in order."""

    def finish(self) -> list[SplitText]:
        """End the output; return the text that was held back."""


def implied_ends(kind: type[ReasoningParser], *, may_call: bool) -> tuple[str, ...]:
    """Return the texts that end reasoning without its close tag.

    Args:
        kind: the model's reasoning parser.
        may_call: whether the model may call tools in its family's own format. If not, text that
            looks like a call is reasoning.
    """
    return (*kind.ends_before, *(kind.call_opens if may_call else ()))


def thought_texts(
    kind: type[ReasoningParser], *, prompt_is_open: bool, may_call: bool
) -> ThoughtTexts:
    """Return the texts by which a `ThoughtScan` finds the same reasoning as the parser `kind`.

    Args:
        kind: the model's reasoning parser.
        prompt_is_open: whether the prompt ends inside reasoning.
        may_call: whether the model may call tools in its family's own format.
    """
    if kind.reopen_tag:
        # The output is a series of messages, each with a header that says if it is reasoning.
        return ThoughtTexts(
            headers=list(kind.ends_before),
            body=kind.open_tag.removeprefix(kind.reopen_tag),
            thought=kind.reopen_tag,
        )
    return ThoughtTexts(
        is_open=kind(prompt_is_open=prompt_is_open, may_call=may_call).is_reasoning,
        open=kind.open_tag,
        ends=[kind.close_tag],
        implied=list(implied_ends(kind, may_call=may_call)),
    )
