"""The reasoning parser protocol: one state machine, fed in pieces, for streams and whole texts."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from openai_api.parser_signs import Signs
from runtime.requests.sampling_params import ThoughtTexts


class SplitText(NamedTuple):
    """More of the reasoning, and more of the answer after it."""

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
        markers: texts that must stay visible in the output for the parser to work.
        splits: thoughts are split off from the answer.
        signs: the signs that a model uses this form of reasoning.
        has_reasoned: whether reasoning has begun.
        is_reasoning: whether the output fed so far ends inside reasoning.
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
        """Begin; the arguments tell whether the prompt ends in reasoning and calls may come."""

    def feed(self, text: str) -> list[SplitText]:
        """Take more output; return the new parts of reasoning and answer, in order."""

    def finish(self) -> list[SplitText]:
        """End the output; return the text that was held back."""


def implied_ends(kind: type[ReasoningParser], *, may_call: bool) -> tuple[str, ...]:
    """Texts that end reasoning without its close tag, for scans of text and of tokens.

    Args:
        kind: the model's reasoning parser.
        may_call: whether the model may call tools in its own form. If not, text that looks like a
            call is a thought.
    """
    return (*kind.ends_before, *(kind.call_opens if may_call else ()))


def thought_texts(
    kind: type[ReasoningParser], *, prompt_is_open: bool, may_call: bool
) -> ThoughtTexts:
    """The texts that `kind` looks for, for a `ThoughtScan` that finds thoughts in the output.

    Args:
        kind: the model's reasoning parser.
        prompt_is_open: whether the prompt itself ends inside reasoning.
        may_call: whether the model may call tools in its own form.
    """
    if kind.reopen_tag:
        # The output is messages, each with a header that states its kind.
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
